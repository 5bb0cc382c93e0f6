#define TIGHTROPE_ISA avx2
#include "rotate_loops.h"
