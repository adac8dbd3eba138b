#include "persistent_kernel.h"

namespace fusedrnn::cuda {
FUSEDRNN_PERSISTENT_STAGES(Sample, Gru)
}  // namespace fusedrnn::cuda
