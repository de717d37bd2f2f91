// The two sweeps of sweep.py in one pass each, for CPU: the row is read from cache the second time, exponents stay in registers.
// Compiled and called by native.py. Axes as there: R scored rows, V columns that are no padding.
//
// Sums are kept in fp32 lanes over a block of columns and in fp64 over blocks. NaN is never compared away: it reaches the sums, and
// with them the check in combine.py.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kBlock = 2048;
constexpr float kLowest = -126.0f;  // below it 2^t is taken as 0, and t as this, so that 0 * t is 0 also for -inf

struct BFloat16 {
  uint16_t bits;
};

inline float load(float x) { return x; }
inline float load(_Float16 x) { return static_cast<float>(x); }
inline float load(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void store(float value, float* at) { *at = value; }
inline void store(float value, _Float16* at) { *at = static_cast<_Float16>(value); }
inline void store(float value, BFloat16* at) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  at->bits = static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);  // to nearest, ties to even
}

// 2^t for t <= 0, to about one unit in the last place.
inline float exp2_of(float t) {
  const float bounded = t < kLowest ? kLowest : t;
  const float whole = std::nearbyintf(bounded);
  const float f = bounded - whole;
  float p = 1.5252734e-5f;  // Taylor coefficients of 2^f, ln(2)^k / k!
  p = p * f + 1.5403530e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return t < kLowest ? 0.0f : p * scale;
}

// With kSquares also the sums of e^2t and e^2t t, behind the label's place in a row of 6 statistics.
template <bool kSquares, class T>
void forward(const T* logits, int64_t stride, const int64_t* rows, int64_t count, int64_t columns, float to_log2, float empty_max,
             float* stats) {
  constexpr int64_t kStatistics = kSquares ? 6 : 4;
  for (int64_t r = 0; r < count; ++r) {
    const T* x = logits + (rows ? rows[r] : r) * stride;
    float highest = empty_max;
#pragma omp simd reduction(max : highest)
    for (int64_t v = 0; v < columns; ++v) {
      const float value = load(x[v]);
      highest = value > highest ? value : highest;
    }
    double sum = 0, weighted = 0, square = 0, weighted_square = 0;
    for (int64_t start = 0; start < columns; start += kBlock) {
      const int64_t stop = start + kBlock < columns ? start + kBlock : columns;
      float s = 0, u = 0, q = 0, w = 0;
#pragma omp simd reduction(+ : s, u, q, w)
      for (int64_t v = start; v < stop; ++v) {
        const float t = (load(x[v]) - highest) * to_log2;
        const float e = exp2_of(t);
        const float bounded = t < kLowest ? kLowest : t;
        s += e;
        u += e * bounded;
        if constexpr (kSquares) {
          const float e2 = e * e;
          q += e2;
          w += e2 * bounded;
        }
      }
      sum += s;
      weighted += u;
      square += q;
      weighted_square += w;
    }
    float* row = stats + kStatistics * r;
    row[0] = highest;
    row[1] = static_cast<float>(sum);
    row[2] = static_cast<float>(weighted);
    if constexpr (kSquares) {
      row[4] = static_cast<float>(square);
      row[5] = static_cast<float>(weighted_square);
    }
  }
}

template <class T>
void backward(const T* logits, int64_t stride, const int64_t* rows, int64_t count, int64_t columns, float to_log2,
              const float* highest, const float* constant, const float* slope, const int64_t* label, const float* at_label, T* out,
              int64_t out_stride) {
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = rows ? rows[r] : r;
    const T* x = logits + row * stride;
    T* y = out + row * out_stride;
    const float m = highest[r], a = constant[r], b = slope[r];
    const auto gradient = [=](float logit) {
      const float t = (logit - m) * to_log2;
      return exp2_of(t) * (a + b * (t < kLowest ? kLowest : t));
    };
    const float labelled = gradient(load(x[label[r]])) + at_label[r];  // read before it may be overwritten
#pragma omp simd
    for (int64_t v = 0; v < columns; ++v) store(gradient(load(x[v])), y + v);
    store(labelled, y + label[r]);
  }
}

}  // namespace

#define SWEEPS(NAME, TYPE)                                                                                                       \
  extern "C" void forward_##NAME(const void* logits, int64_t stride, const int64_t* rows, int64_t count, int64_t columns,        \
                                 float to_log2, float empty_max, float* stats, int64_t statistics) {                             \
    const auto sweep = statistics == 6 ? forward<true, TYPE> : forward<false, TYPE>;                                             \
    sweep(static_cast<const TYPE*>(logits), stride, rows, count, columns, to_log2, empty_max, stats);                            \
  }                                                                                                                              \
  extern "C" void backward_##NAME(const void* logits, int64_t stride, const int64_t* rows, int64_t count, int64_t columns,       \
                                  float to_log2, const float* highest, const float* constant, const float* slope,                \
                                  const int64_t* label, const float* at_label, void* out, int64_t out_stride) {                  \
    backward(static_cast<const TYPE*>(logits), stride, rows, count, columns, to_log2, highest, constant, slope, label, at_label, \
             static_cast<TYPE*>(out), out_stride);                                                                               \
  }

SWEEPS(float32, float)
SWEEPS(float16, _Float16)
SWEEPS(bfloat16, BFloat16)
