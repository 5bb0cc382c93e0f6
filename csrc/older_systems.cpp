// Lets the library run on systems that are older than the one that links it: from glibc 2.28 and the C++ library of
// GCC 8 on, which is what manylinux_2_28 means. New compilers and C libraries prefer functions that older systems
// lack, under new symbol versions. This file defines them for this library alone, or binds them to their first version.
#if defined(__linux__)
#include <stdlib.h>

#include <new>
#include <sstream>
#endif

#if defined(__GLIBC__) && defined(__GLIBCXX__) && (defined(__x86_64__) || defined(__aarch64__))

#if defined(__x86_64__)
#define FIRST "@GLIBC_2.2.5"
#else
#define FIRST "@GLIBC_2.17"
#endif
#define HIDDEN __attribute__((visibility("hidden")))

// Their versions of glibc 2.29 compute the same and leave out an old way to handle errors.
extern "C" double first_exp(double);
extern "C" double first_pow(double, double);
asm(".symver first_exp, exp" FIRST);
asm(".symver first_pow, pow" FIRST);
HIDDEN double own_exp(double x) asm("exp");
HIDDEN double own_pow(double x, double y) asm("pow");
double own_exp(double x) { return first_exp(x); }
double own_pow(double x, double y) { return first_pow(x, y); }

// glibc 2.32. Zero is always right: reference counts are then atomic.
extern "C" HIDDEN char own_single_threaded asm("__libc_single_threaded");
char own_single_threaded = 0;

// GCC 11. Weak, for those who link a static C++ library, which has it.
[[noreturn]] __attribute__((weak)) HIDDEN void own_throw() asm("_ZSt28__throw_bad_array_new_lengthv");
void own_throw() { throw std::bad_array_new_length(); }

// GCC 9.
template std::basic_ostringstream<char>::basic_ostringstream();
template std::basic_stringstream<char>::basic_stringstream();
asm(".hidden _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
asm(".hidden _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC2Ev");
asm(".hidden _ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
asm(".hidden _ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC2Ev");

#endif
