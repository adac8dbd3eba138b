// The CPU kernels for any processor.
#define FUSEDRNN_ISA baseline
#include "step_impl.h"
