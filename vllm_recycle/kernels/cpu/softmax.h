// The softmax of one row of scores, on x86 with the bits of vLLM's.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "lanes.h"

namespace {

#if defined(__AVX512F__)
// e^x as vLLM's AVX-512 builds have it: 2^n * p(r) with x = n ln 2 + r.
inline Vec exponential(Vec x) {
  const __m512 lowest = _mm512_set1_ps(-87.3365479f);
  const __mmask16 counts = _mm512_cmp_ps_mask(__m512(x), lowest, _CMP_NLT_US);
  const __m512 from = _mm512_max_ps(__m512(x), lowest);
  const __m512 half = _mm512_set1_ps(0.5f), log2_e = _mm512_set1_ps(1.44269502f);
  const __m512i n = _mm512_cvt_roundps_epi32(_mm512_fmadd_ps(from, log2_e, half),
                                             _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(n), _mm512_set1_ps(0.693147182f), from);
  __m512 p = _mm512_set1_ps(0.00828929059f);
  for (float next : {0.0418978221f, 0.166676521f, 0.499991506f, 0.999999701f, 1.0f}) {
    p = _mm512_fmadd_ps(r, p, _mm512_set1_ps(next));
  }
  const __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(126)), 23);
  p = _mm512_maskz_mul_ps(counts, p, _mm512_castsi512_ps(bits));
  return Vec(_mm512_add_ps(p, p));
}
#elif defined(__AVX2__)
typedef double DoubleVec __attribute__((vector_size(32)));
typedef int64_t LongVec __attribute__((vector_size(32)));

inline DoubleVec add_product(DoubleVec sum, DoubleVec a, DoubleVec b) {
#ifdef __FMA__
  return DoubleVec(_mm256_fmadd_pd(__m256d(a), __m256d(b), __m256d(sum)));
#else
  return sum + a * b;
#endif
}

// e^x by 2^n * p(r) with x = n ln 2 + r, relative error 2^-36, for x from -87 to 88. Terms of p are
// added by pairs, which do not wait for each other.
inline DoubleVec nearly_exponential(DoubleVec x) {
  constexpr double ROUND = 6755399441055744.0;  // a sum with it is whole, and has n in its lowest bits
  const DoubleVec zero = {}, shifted = add_product(zero + ROUND, x, zero + 1.4426950408889634);
  const DoubleVec r = add_product(x, shifted - ROUND, zero - 0.6931471805599453);
  const DoubleVec r2 = r * r, r4 = r2 * r2;
  const DoubleVec p01 = r + 1.0, p23 = add_product(zero + 0.5, r, zero + 1.0 / 6);
  const DoubleVec p45 = add_product(zero + 1.0 / 24, r, zero + 1.0 / 120);
  const DoubleVec p67 = add_product(zero + 1.0 / 720, r, zero + 1.0 / 5040);
  const DoubleVec p89 = add_product(zero + 1.0 / 40320, r, zero + 1.0 / 362880);
  const DoubleVec low = add_product(p01, p23, r2);
  const DoubleVec high = add_product(add_product(p45, p67, r2), p89, r4);
  const DoubleVec p = add_product(low, high, r4);
  return DoubleVec(LongVec(p) + (LongVec(shifted) << 52));
}

// e^x as vLLM's AVX2 build has it, by the C library, whose error is below 0.502 units in the last
// place: it is asked where that, and the error here, leave a doubt about the nearest float.
inline Vec exponential(Vec x) {
  const DoubleVec low = nearly_exponential(_mm256_cvtps_pd(_mm256_castps256_ps128(x)));
  const DoubleVec high = nearly_exponential(_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  Vec result = _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low));
  // Of the 29 bits that a float has not, half a unit has the upper eight 0 after this sum.
  const __m256 words = _mm256_shuffle_ps(__m256(low), __m256(high), 0x88);  // lanes 0 1 4 5 2 3 6 7
  const IntVec bits = IntVec(_mm256_permute4x64_epi64(_mm256_castps_si256(words), 0xd8));
  const IntVec rest = (bits + 0x10100000) & 0x1fe00000;
  const IntVec none = x < -104.0f;  // the nearest float is 0
  const IntVec sure = none | ((rest != 0) & (x >= -87.0f) & (x <= 88.0f));
  result = Vec(IntVec(result) & ~none);
  for (int doubts = 0xff ^ _mm256_movemask_ps(__m256(sure)); doubts; doubts &= doubts - 1) {
    const int lane = __builtin_ctz(doubts);
    result[lane] = std::exp(x[lane]);
  }
  return result;
}
#else
// e^x: 2^n * p(f) with x = (n + f) ln 2, |f| <= 1/2; relative error about 2e-7.
inline Vec exponential(Vec x) {
  const Vec magic = splat(12582912.0f);
  Vec scaled = x * 1.44269504088896341f;
  Vec n = (scaled + magic) - magic;
  Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec result = p * reinterpret_cast<Vec&>(exponent);
  IntVec in_range = x > -87.0f;
  IntVec bits = reinterpret_cast<IntVec&>(result) & in_range;
  return reinterpret_cast<Vec&>(bits);
}
#endif

// As vLLM adds up the sums of lanes.
inline float sum_of(const Vec* x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps(__m512(x[0]));
#else
  float total = 0;
  for (int64_t p = 0; p < PARTS; p++) {
    float part = 0;
    for (int64_t lane = 0; lane < WIDTH; lane++) part += x[p][lane];
    total += part;
  }
  return total;
#endif
}

constexpr float HIDDEN = -1e30f;  // the score of what a row does not see

// Exponentiates one row of scores in place; returns 1 / sum. A sink is one more score in the sum;
// -infinity is none.
inline float softmax_row(float* scores, int64_t padded, float sink) {
  Vec top = splat(HIDDEN);
  for (int64_t c = 0; c < padded; c += WIDTH) {
    Vec value = load(scores + c);
    top = value > top ? value : top;
  }
  float max = HIDDEN;
  for (int64_t lane = 0; lane < WIDTH; lane++) max = std::max(max, top[lane]);
  if (sink - max >= -8) max = sink;  // as in vLLM: weights may be above one
  Vec sum[PARTS] = {};
  for (int64_t c = 0; c < padded; c += LANES) {
    for (int64_t p = 0; p < PARTS; p++) {
      Vec weight = exponential(load(scores + c + p * WIDTH) - max);
      store(scores + c + p * WIDTH, weight);
      sum[p] += weight;
    }
  }
  return 1.0f / (sum_of(sum) + std::exp(sink - max));
}

}  // namespace
