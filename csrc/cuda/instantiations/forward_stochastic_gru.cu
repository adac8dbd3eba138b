#include "../forward_kernel.h"

FUSEDRNN_FORWARD_KERNELS(stochastic_gru)
