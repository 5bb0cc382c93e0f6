#define TIGHTROPE_ISA avx512
#include "rotate_loops.h"
