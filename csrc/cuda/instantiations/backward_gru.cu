#include "../backward_kernel.h"

FUSEDRNN_BACKWARD_KERNELS(gru)
