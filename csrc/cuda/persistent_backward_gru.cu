#include "persistent_backward_kernel.h"

namespace fusedrnn::cuda {
FUSEDRNN_PERSISTENT_BACKWARD_STAGES(Gru)
}  // namespace fusedrnn::cuda
