// The two sweeps of sweep.py in one pass each, for CPU: the row is read from cache the second time, exponents stay in registers.
// Compiled and called by native.py. Axes as there: R scored rows, V columns that are no padding.
//
// Sums are kept in fp32 lanes over a block of columns and in fp64 over blocks. NaN is never compared away: it reaches the sums, and
// with them the check in combine.py.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// Columns of a block. While one is computed, the next one is brought into the cache: the processor alone starts too late for that
// where a row's pages lie apart.
constexpr int64_t kBlock = 1024;
constexpr float kLowest = -127.0f;  // below it t is taken as this, whose power is 0, so that 0 * t is 0 also for -inf

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

// 2^t for t <= 0, to about one unit in the last place; below 2^-126.5 it is exactly 0. NaN stays NaN.
inline float exp2_of(float t) {
  // Adding this rounds t to an integer, whose sum with the exponent's bias then stands in the lowest bits.
  constexpr float kRound = 12582912.0f + 127.0f;  // 1.5 * 2^23
  const float rounded = t + kRound;
  const float f = t - (rounded - kRound);
  float p = 1.53533620e-4f;  // minimax for 2^f on [-1/2, 1/2], 1 at 0
  p = p * f + 1.33988750e-3f;
  p = p * f + 9.61843692e-3f;
  p = p * f + 5.55033237e-2f;
  p = p * f + 2.40226477e-1f;
  p = p * f + 6.93147182e-1f;
  p = p * f + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  bits <<= 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

// Asks for the block that starts at x. An address behind the logits is no error: nothing is read.
template <class T>
inline void prefetch(const T* x) {
  for (int64_t v = 0; v < kBlock; v += 64 / sizeof(T)) __builtin_prefetch(x + v);
}

inline float bounded(float t) { return t < kLowest ? kLowest : t; }

// With kSquares also the sums of e^2t and e^2t t, behind the label's place in a row of 6 statistics.
template <bool kSquares, class T>
void forward(const T* logits, int64_t stride, const int64_t* rows, int64_t count, int64_t columns, float to_log2, float empty_max,
             float* stats) {
  constexpr int64_t kStatistics = kSquares ? 6 : 4;
  for (int64_t r = 0; r < count; ++r) {
    const T* x = logits + (rows ? rows[r] : r) * stride;
    float highest = empty_max;
    double sum = 0, weighted = 0, square = 0, weighted_square = 0;
    for (int64_t start = 0; start < columns; start += kBlock) {
      const int64_t stop = start + kBlock < columns ? start + kBlock : columns;
      float block = highest;
#pragma omp simd reduction(max : block)
      for (int64_t v = start; v < stop; ++v) {
        const float value = load(x[v]);
        block = value > block ? value : block;
      }
      if (block > highest) {  // the sums so far are brought to the new maximum: e^t t becomes e^(t + d) (t + d)
        const double d = (static_cast<double>(highest) - block) * to_log2, factor = std::exp2(d);
        weighted = factor * (weighted + d * sum);
        sum *= factor;
        if constexpr (kSquares) {
          weighted_square = factor * factor * (weighted_square + d * square);
          square *= factor * factor;
        }
        highest = block;
      }
      prefetch(x + stop);
      float s = 0, u = 0, q = 0, w = 0;
#pragma omp simd reduction(+ : s, u, q, w)
      for (int64_t v = start; v < stop; ++v) {
        const float t = bounded((load(x[v]) - highest) * to_log2);
        const float e = exp2_of(t);
        s += e;
        u += e * t;
        if constexpr (kSquares) {
          const float e2 = e * e;
          q += e2;
          w += e2 * t;
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

template <class T, class Out>
void backward(const T* logits, int64_t stride, const int64_t* rows, int64_t count, int64_t columns, float to_log2,
              const float* highest, const float* constant, const float* slope, const int64_t* label, const float* at_label,
              Out* out, int64_t out_stride) {
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = rows ? rows[r] : r;
    const T* x = logits + row * stride;
    Out* y = out + row * out_stride;
    const float m = highest[r], a = constant[r], b = slope[r];
    const auto gradient = [=](float logit) {
      const float t = bounded((logit - m) * to_log2);
      return exp2_of(t) * (a + b * t);
    };
    const float labelled = gradient(load(x[label[r]])) + at_label[r];  // read before it may be overwritten
    for (int64_t start = 0; start < columns; start += kBlock) {
      const int64_t stop = start + kBlock < columns ? start + kBlock : columns;
      prefetch(x + stop);
#pragma omp simd
      for (int64_t v = start; v < stop; ++v) store(gradient(load(x[v])), y + v);
    }
    store(labelled, y + label[r]);
  }
}

}  // namespace

#define FORWARD(NAME, TYPE)                                                                                                      \
  extern "C" void forward_##NAME(const void* logits, int64_t stride, const int64_t* rows, int64_t count, int64_t columns,        \
                                 float to_log2, float empty_max, float* stats, int64_t statistics) {                             \
    const auto sweep = statistics == 6 ? forward<true, TYPE> : forward<false, TYPE>;                                             \
    sweep(static_cast<const TYPE*>(logits), stride, rows, count, columns, to_log2, empty_max, stats);                            \
  }

#define BACKWARD(NAME, TYPE, OUT)                                                                                                \
  extern "C" void backward_##NAME(const void* logits, int64_t stride, const int64_t* rows, int64_t count, int64_t columns,       \
                                  float to_log2, const float* highest, const float* constant, const float* slope,                \
                                  const int64_t* label, const float* at_label, void* out, int64_t out_stride) {                  \
    backward(static_cast<const TYPE*>(logits), stride, rows, count, columns, to_log2, highest, constant, slope, label, at_label, \
             static_cast<OUT*>(out), out_stride);                                                                                \
  }

FORWARD(float32, float)
FORWARD(float16, _Float16)
FORWARD(bfloat16, BFloat16)
BACKWARD(float32_float32, float, float)
BACKWARD(float16_float16, _Float16, _Float16)
BACKWARD(bfloat16_bfloat16, BFloat16, BFloat16)
BACKWARD(float32_float16, float, _Float16)
BACKWARD(float32_bfloat16, float, BFloat16)
