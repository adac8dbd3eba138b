#include "../backward_kernel.h"

FUSEDRNN_BACKWARD_KERNELS(stochastic_gru)
