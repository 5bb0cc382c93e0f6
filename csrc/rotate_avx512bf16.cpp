#define TIGHTROPE_ISA avx512bf16
#include "rotate_loops.h"
