// What the C++ kernels compute with: vectors of floats, and bfloat16. On x86 they round as vLLM's
// build for the machine does: there is one for AVX2, and two for AVX-512.

#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t LANES = 16;  // what caches, rows and heads are whole multiples of
#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16;  // of a register
#elif defined(__AVX2__)
constexpr int64_t WIDTH = 8;
#else
constexpr int64_t WIDTH = 4;
#endif
constexpr int64_t PARTS = LANES / WIDTH;
typedef float Vec __attribute__((vector_size(WIDTH * 4), aligned(4)));
typedef int32_t IntVec __attribute__((vector_size(WIDTH * 4), aligned(4)));
typedef uint16_t HalfVec __attribute__((vector_size(WIDTH * 2), aligned(2)));
typedef uint32_t WordVec __attribute__((vector_size(WIDTH * 4), aligned(4)));

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t word = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec load(const bf16* p) {
  WordVec words = __builtin_convertvector(*reinterpret_cast<const HalfVec*>(p), WordVec) << 16;
  return reinterpret_cast<Vec&>(words);
}
inline Vec splat(float x) { return x - Vec{}; }
inline void store(float* out, Vec x) { *reinterpret_cast<Vec*>(out) = x; }
inline void store(bf16* out, Vec x) {
  WordVec words = reinterpret_cast<WordVec&>(x);
#if !defined(__x86_64__) || defined(__AVX512BF16__)
  words += 0x7fff + (words >> 16 & 1);
#endif  // vLLM's other builds for x86 drop the lower bits.
  *reinterpret_cast<HalfVec*>(out) = __builtin_convertvector(words >> 16, HalfVec);
}

// x, in a register: else a compiler may load it anew for each product, which takes longer.
inline Vec in_register(Vec x) {
#ifdef __x86_64__
  asm("" : "+v"(x));
#endif
  return x;
}

// sum + a * b: on x86 rounded once with AVX-512, else twice.
inline Vec add_product(Vec sum, Vec a, Vec b) {
#ifdef __AVX512F__
  return Vec(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(sum)));
#else
  return sum + a * b;
#endif
}

}  // namespace
