#include "persistent_kernel.h"

namespace fusedrnn::cuda {
FUSEDRNN_PERSISTENT_STAGES(Linear, Gru)
}  // namespace fusedrnn::cuda
