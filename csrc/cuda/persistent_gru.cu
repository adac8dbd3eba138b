#include "persistent_kernel.h"

namespace fusedrnn::cuda {
FUSEDRNN_PERSISTENT_STAGES(Gru)
}  // namespace fusedrnn::cuda
