#include "../forward_kernel.h"

FUSEDRNN_FORWARD_KERNELS(projected_lstm)
