#define TIGHTROPE_ISA baseline
#include "rotate_loops.h"
