// What the C++ kernels compute with: vectors of 16 floats, and bfloat16.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t LANES = 16;
typedef float Vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2), aligned(2)));
typedef uint32_t WordVec __attribute__((vector_size(LANES * 4), aligned(4)));

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
inline void store(float* out, float x) { *out = x; }
inline void store(bf16* out, float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  out->bits = uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}
inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec load(const bf16* p) {
  WordVec words = __builtin_convertvector(*reinterpret_cast<const HalfVec*>(p), WordVec) << 16;
  return reinterpret_cast<Vec&>(words);
}
inline Vec splat(float x) { return x - Vec{}; }

}  // namespace
