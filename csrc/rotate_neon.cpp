#define TIGHTROPE_ISA neon
#include "rotate_loops.h"
