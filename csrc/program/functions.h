// Functions that a generated stage may call beside those of base/math.h.
#pragma once
#include "../base/math.h"

namespace fusedrnn::program {}
