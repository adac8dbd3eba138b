#include "../forward_kernel.h"

FUSEDRNN_FORWARD_KERNELS(mean_gru)
