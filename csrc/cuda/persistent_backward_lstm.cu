#include "persistent_backward_kernel.h"

namespace fusedrnn::cuda {
FUSEDRNN_PERSISTENT_BACKWARD_STAGES(Lstm)
}  // namespace fusedrnn::cuda
