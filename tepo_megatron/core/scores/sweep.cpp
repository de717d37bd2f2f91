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

// In one rounding where the processor can. Left to the compiler, each kind of `forward` rounds otherwise, and the last bits of an
// entropy would depend on whether there is a teacher.
inline float multiply_add(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline float bounded(float t) { return t < kLowest ? kLowest : t; }

// log2 of a normal number, to about one unit in the last place; finite for 0, so that 0 * it is 0.
inline float log2_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  constexpr uint32_t kRootHalf = 0x3F3504F3u;
  const uint32_t above = bits - kRootHalf;
  const float exponent = static_cast<float>(static_cast<int32_t>(above) >> 23);
  bits = (above & 0x007FFFFFu) + kRootHalf;
  float m;  // in [sqrt(1/2), sqrt(2))
  std::memcpy(&m, &bits, sizeof m);
  const float z = (m - 1.0f) / (m + 1.0f), z2 = z * z;  // log m = 2 (z + z^3/3 + z^5/5 + ...)
  float p = 0.320598898f;
  p = p * z2 + 0.412198583f;
  p = p * z2 + 0.577078016f;
  p = p * z2 + 0.961796694f;
  p = p * z2 + 2.88539008f;
  return p * z + exponent;
}

enum Kind : int64_t { kNone, kForward, kReverse, kJsd };  // which divergence

// The highest logit of a row so far.
template <class T>
inline float highest_of(const T* x, int64_t start, int64_t stop, float highest) {
#pragma omp simd reduction(max : highest)
  for (int64_t v = start; v < stop; ++v) {
    const float value = load(x[v]);
    highest = value > highest ? value : highest;
  }
  return highest;
}

// The first column of a block with this logit.
template <class T>
inline int64_t column_of(const T* x, int64_t start, int64_t stop, float highest) {
  int32_t column = static_cast<int32_t>(stop - start);
#pragma omp simd reduction(min : column)
  for (int32_t v = 0; v < static_cast<int32_t>(stop - start); ++v) {
    const int32_t here = load(x[start + v]) == highest ? v : INT32_MAX;
    column = here < column ? here : column;
  }
  return start + column;
}

// With kSquares also the sums of e^2t and e^2t t, behind the label's place in a row of statistics; with a kind the teacher's six at
// its end.
template <bool kSquares, Kind kKind, class T>
void forward(const T* logits, int64_t stride, const int64_t* rows, int64_t count, int64_t columns, float to_log2, float empty_max,
             float* stats, int64_t statistics, const T* teacher, int64_t teacher_stride) {
  for (int64_t r = 0; r < count; ++r) {
    const T* x = logits + (rows ? rows[r] : r) * stride;
    [[maybe_unused]] const T* y = kKind != kNone ? teacher + (rows ? rows[r] : r) * teacher_stride : nullptr;
    float highest = empty_max;
    double sum = 0, weighted = 0, square = 0, weighted_square = 0;
    [[maybe_unused]] float teacher_highest = empty_max;
    [[maybe_unused]] double teacher_sum = 0, cross = 0;
    [[maybe_unused]] int64_t column = 0, teacher_column = 0;
    for (int64_t start = 0; start < columns; start += kBlock) {
      const int64_t stop = start + kBlock < columns ? start + kBlock : columns;
      const float block = highest_of(x, start, stop, highest);
      if constexpr (kKind != kNone) {
        const float teacher_block = highest_of(y, start, stop, teacher_highest);
        const double d = (static_cast<double>(highest) - block) * to_log2;
        const double e = (static_cast<double>(teacher_highest) - teacher_block) * to_log2;
        if (block > highest) column = column_of(x, start, stop, block);
        if (teacher_block > teacher_highest) teacher_column = column_of(y, start, stop, teacher_block);
        if (block > highest || teacher_block > teacher_highest) {  // as below, with s - t, which becomes s - t + e - d
          const double factor = std::exp2(e), of_cross = kKind == kReverse ? std::exp2(d) : factor;
          cross += kKind == kReverse ? (d - e) * sum : (e - d) * teacher_sum;
          cross = of_cross >= 0x1p-126 ? of_cross * cross : 0;  // it may be infinite; less is no weight within a block either
          teacher_sum *= factor;
          teacher_highest = teacher_block;
        }
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
      if constexpr (kKind != kNone) prefetch(y + stop);
      float s = 0, u = 0, q = 0, w = 0, f = 0, c = 0;
#pragma omp simd reduction(+ : s, u, q, w, f, c)
      for (int64_t v = start; v < stop; ++v) {
        const float raw = (load(x[v]) - highest) * to_log2;
        const float t = bounded(raw);
        const float e = exp2_of(t);
        s += e;
        u = multiply_add(e, t, u);
        if constexpr (kSquares) {
          const float e2 = e * e;
          q += e2;
          w = multiply_add(e2, t, w);
        }
        if constexpr (kKind != kNone) {  // the logarithms are not bounded: of a probability that is not 0 all of it counts
          const float other = (load(y[v]) - teacher_highest) * to_log2;
          const float g = exp2_of(bounded(other));
          f += g;
          if constexpr (kKind == kForward) c += g > 0 ? g * (other - raw) : 0.0f;
          if constexpr (kKind == kReverse) c += e > 0 ? e * (raw - other) : 0.0f;
        }
      }
      sum += s;
      weighted += u;
      square += q;
      weighted_square += w;
      teacher_sum += f;
      cross += c;
    }
    float* row = stats + statistics * r;
    row[0] = highest;
    row[1] = static_cast<float>(sum);
    row[2] = static_cast<float>(weighted);
    if constexpr (kSquares) {
      row[4] = static_cast<float>(square);
      row[5] = static_cast<float>(weighted_square);
    }
    if constexpr (kKind != kNone) {
      float* last = row + statistics - 6;
      last[0] = static_cast<float>(column);
      last[1] = teacher_highest;
      last[2] = static_cast<float>(teacher_sum);
      last[3] = static_cast<float>(teacher_column);
      last[5] = static_cast<float>(cross);
    }
  }
}

// KL(student || m) and KL(teacher || m) of the columns, in units of log 2, with m = (1 - beta) student + beta teacher.
template <class T>
void mixture(const T* logits, int64_t stride, const int64_t* rows, int64_t count, int64_t columns, float to_log2, const T* teacher,
             int64_t teacher_stride, float beta, const float* highest, const float* log_sum, const float* teacher_highest,
             const float* teacher_log_sum, float* sums) {
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = rows ? rows[r] : r;
    const T* x = logits + row * stride;
    const T* y = teacher + row * teacher_stride;
    const float m = highest[r], n = teacher_highest[r], a = log_sum[r], b = teacher_log_sum[r];
    double own = 0, others = 0;
    for (int64_t start = 0; start < columns; start += kBlock) {
      const int64_t stop = start + kBlock < columns ? start + kBlock : columns;
      prefetch(x + stop);
      prefetch(y + stop);
      float g = 0, h = 0;
#pragma omp simd reduction(+ : g, h)
      for (int64_t v = start; v < stop; ++v) {
        const float log_p = bounded((load(x[v]) - m) * to_log2 - a), log_q = bounded((load(y[v]) - n) * to_log2 - b);
        const float p = exp2_of(log_p), q = exp2_of(log_q), mixed = (1 - beta) * p + beta * q;
        const float log_m = log2_of(mixed);
        g += p * (log_p - log_m);
        h += q * (log_q - log_m);
      }
      own += g;
      others += h;
    }
    sums[2 * r] = static_cast<float>(own);
    sums[2 * r + 1] = static_cast<float>(others);
  }
}

struct Teacher {
  int64_t stride;
  const float *factor, *highest, *of_student, *of_teacher;  // of_student = (1 - beta) / S, of_teacher = beta / S(teacher)
};

// e^t (a + b t), and factor w more, with the w of `teacher_terms`.
template <Kind kKind, class T, class Out>
void backward(const T* logits, int64_t stride, const int64_t* rows, int64_t count, int64_t columns, float to_log2,
              const float* highest, const float* constant, const float* slope, const int64_t* label, const float* at_label,
              Out* out, int64_t out_stride, [[maybe_unused]] const T* teacher_logits, [[maybe_unused]] Teacher teacher) {
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = rows ? rows[r] : r;
    const T* x = logits + row * stride;
    [[maybe_unused]] const T* y = nullptr;
    Out* out_row = out + row * out_stride;
    const float m = highest[r], a = constant[r], b = slope[r];
    [[maybe_unused]] float n = 0, factor = 0, of_student = 0, of_teacher = 0;
    if constexpr (kKind != kNone) {
      y = teacher_logits + row * teacher.stride;
      n = teacher.highest[r], factor = teacher.factor[r], of_student = teacher.of_student[r], of_teacher = teacher.of_teacher[r];
    }
    const auto gradient = [=](int64_t v) {
      const float t = bounded((load(x[v]) - m) * to_log2);
      const float e = exp2_of(t);
      float sum = e * (a + b * t);
      if constexpr (kKind != kNone) {
        const float other = (load(y[v]) - n) * to_log2;
        if constexpr (kKind == kForward) sum += factor * exp2_of(bounded(other));
        if constexpr (kKind == kReverse) sum += e > 0 ? factor * e * other : 0.0f;
        if constexpr (kKind == kJsd) {
          const float mixed = of_student * e + of_teacher * exp2_of(bounded(other));
          sum += factor * e * log2_of(mixed);
        }
      }
      return sum;
    };
    const float labelled = gradient(label[r]) + at_label[r];  // read before it may be overwritten
    for (int64_t start = 0; start < columns; start += kBlock) {
      const int64_t stop = start + kBlock < columns ? start + kBlock : columns;
      prefetch(x + stop);
      if constexpr (kKind != kNone) prefetch(y + stop);
#pragma omp simd
      for (int64_t v = start; v < stop; ++v) store(gradient(v), out_row + v);
    }
    store(labelled, out_row + label[r]);
  }
}

// A JSD's sums of the first pass are those of a forward KL, without the last.
template <class T>
auto forward_of(bool squares, int64_t kind) {
  if (kind == kNone) return squares ? forward<true, kNone, T> : forward<false, kNone, T>;
  if (kind == kReverse) return squares ? forward<true, kReverse, T> : forward<false, kReverse, T>;
  return squares ? forward<true, kForward, T> : forward<false, kForward, T>;
}

template <class T, class Out>
auto backward_of(int64_t kind) {
  if (kind == kNone) return backward<kNone, T, Out>;
  if (kind == kForward) return backward<kForward, T, Out>;
  return kind == kReverse ? backward<kReverse, T, Out> : backward<kJsd, T, Out>;
}

}  // namespace

#define FORWARD(NAME, TYPE)                                                                                                      \
  extern "C" void forward_##NAME(const void* logits, int64_t stride, const int64_t* rows, int64_t count, int64_t columns,        \
                                 float to_log2, float empty_max, float* stats, int64_t statistics, const void* teacher,          \
                                 int64_t teacher_stride, int64_t squares, int64_t kind) {                                        \
    forward_of<TYPE>(squares != 0, kind)(static_cast<const TYPE*>(logits), stride, rows, count, columns, to_log2, empty_max,     \
                                         stats, statistics, static_cast<const TYPE*>(teacher), teacher_stride);                  \
  }                                                                                                                              \
  extern "C" void mixture_##NAME(const void* logits, int64_t stride, const int64_t* rows, int64_t count, int64_t columns,        \
                                 float to_log2, const void* teacher, int64_t teacher_stride, float beta, const float* highest,   \
                                 const float* log_sum, const float* teacher_highest, const float* teacher_log_sum, float* sums) { \
    mixture(static_cast<const TYPE*>(logits), stride, rows, count, columns, to_log2, static_cast<const TYPE*>(teacher),          \
            teacher_stride, beta, highest, log_sum, teacher_highest, teacher_log_sum, sums);                                     \
  }

#define BACKWARD(NAME, TYPE, OUT)                                                                                                \
  extern "C" void backward_##NAME(const void* logits, int64_t stride, const int64_t* rows, int64_t count, int64_t columns,       \
                                  float to_log2, const float* highest, const float* constant, const float* slope,                \
                                  const int64_t* label, const float* at_label, void* out, int64_t out_stride, int64_t kind,      \
                                  const void* teacher, int64_t teacher_stride, const float* factor,                              \
                                  const float* teacher_highest, const float* of_student, const float* of_teacher) {              \
    const Teacher rest{teacher_stride, factor, teacher_highest, of_student, of_teacher};                                         \
    backward_of<TYPE, OUT>(kind)(static_cast<const TYPE*>(logits), stride, rows, count, columns, to_log2, highest, constant,     \
                                 slope, label, at_label, static_cast<OUT*>(out), out_stride,                                     \
                                 static_cast<const TYPE*>(teacher), rest);                                                       \
  }

FORWARD(float32, float)
FORWARD(float16, _Float16)
FORWARD(bfloat16, BFloat16)
BACKWARD(float32_float32, float, float)
BACKWARD(float16_float16, _Float16, _Float16)
BACKWARD(bfloat16_bfloat16, BFloat16, BFloat16)
BACKWARD(float32_float16, float, _Float16)
BACKWARD(float32_bfloat16, float, BFloat16)
