// Kernels for CPUs, which `build.py` compiles and XLA calls.
//
// Attention, causal, forward and backward: the scores of a block of queries never leave a core's cache. Arrays are float32,
// [B, T, heads, size]; a key/value head serves N / K query heads. A task is one key/value head of one row: no two tasks add
// to the same number, and a task adds in one order, so that the result does not depend on the number of threads.
//
// The product of an int8 matrix and a few rows, exact in int32, at the speed at which memory delivers the matrix.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using Bytes = ffi::Buffer<ffi::S8>;

#if defined(__AVX512F__)
constexpr int kWidth = 16, kTileRows = 12;
#elif defined(__AVX__)
constexpr int kWidth = 8, kTileRows = 6;
#else
constexpr int kWidth = 4, kTileRows = 6;
#endif
constexpr int kTileVectors = 2;  // of a tile's row: kTileRows x kTileVectors sums are in registers
constexpr int64_t kQueries = 24;  // rows of scores at once

typedef float Vector __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef int32_t IntVector __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));

static inline Vector& At(float* p) { return *reinterpret_cast<Vector*>(p); }
static inline const Vector& At(const float* p) { return *reinterpret_cast<const Vector*>(p); }
static int64_t RoundUp(int64_t n) { return (n + kWidth - 1) / kWidth * kWidth; }

// e^x to the last bits, and 0 below -87, where float32 ends.
static inline Vector Exp(Vector x) {
  const Vector shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are an integer
  const Vector n = shifted - 12582912.0f;
  const Vector r = x - n * 0.693145752f - n * 1.42860677e-6f;
  Vector p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const IntVector bits = (IntVector)p + (((IntVector)shifted - 0x4B400000) << 23);
  return x > -87.0f ? (Vector)bits : Vector{};
}

static inline Vector Tanh(Vector x) {
  const Vector bounded = x > 20.0f ? Vector{} + 20.0f : (x < -20.0f ? Vector{} - 20.0f : x);
  const Vector e = Exp(bounded * 2.0f);
  return (e - 1.0f) / (e + 1.0f);
}

// C (+)= A B for a tile. A[m, k] is a[m * am + k * ak]. B and C have rows of whole vectors.
template <int kRows, int kVectors>
static inline void Tile(int64_t depth, const float* a, int64_t am, int64_t ak, const float* b, int64_t bk, float* c,
                        int64_t cm, bool add) {
  Vector sum[kRows][kVectors];  // in registers, if all loops over it are unrolled
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[m][v] = add ? At(c + m * cm + v * kWidth) : Vector{};
  for (int64_t k = 0; k < depth; ++k) {
    Vector row[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) row[v] = At(b + k * bk + v * kWidth);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const float x = a[m * am + k * ak];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[m][v] += x * row[v];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) At(c + m * cm + v * kWidth) = sum[m][v];
}

template <int kVectors>
static inline void Panel(int64_t rows, int64_t depth, const float* a, int64_t am, int64_t ak, const float* b,
                         int64_t bk, float* c, int64_t cm, bool add) {
  int64_t m = 0;
  for (; m + kTileRows <= rows; m += kTileRows)
    Tile<kTileRows, kVectors>(depth, a + m * am, am, ak, b, bk, c + m * cm, cm, add);
  for (; m + 4 <= rows; m += 4) Tile<4, kVectors>(depth, a + m * am, am, ak, b, bk, c + m * cm, cm, add);
  for (; m < rows; ++m) Tile<1, kVectors>(depth, a + m * am, am, ak, b, bk, c + m * cm, cm, add);
}

// C [rows, columns] (+)= A [rows, depth] B [depth, columns], where columns is a multiple of kWidth.
static void Multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t am, int64_t ak,
                     const float* b, int64_t bk, float* c, int64_t cm, bool add = false) {
  constexpr int64_t kStep = kTileVectors * kWidth;
  int64_t n = 0;
  for (; n + kStep <= columns; n += kStep)
    Panel<kTileVectors>(rows, depth, a, am, ak, b + n, bk, c + n, cm, add);
  for (; n < columns; n += kWidth) Panel<1>(rows, depth, a, am, ak, b + n, bk, c + n, cm, add);
}

// Memory of a thread for one task, kept between calls.
class Scratch {
 public:
  explicit Scratch(int64_t floats) {
    if (floats > size_) {
      std::free(memory_);
      size_ = floats;
      memory_ = static_cast<float*>(std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64));
    }
    next_ = memory_;
  }
  float* Take(int64_t floats) {
    float* taken = next_;
    next_ += (floats + 15) / 16 * 16;
    return taken;
  }

 private:
  static thread_local float* memory_;
  static thread_local int64_t size_;
  float* next_;
};
thread_local float* Scratch::memory_ = nullptr;
thread_local int64_t Scratch::size_ = 0;

// The n rows of a head, each `stride` floats after the last, as [n, padded] with zeros to the right.
static void Pack(int64_t n, int64_t size, int64_t padded, const float* from, int64_t stride, float* to) {
  for (int64_t t = 0; t < n; ++t) {
    std::memcpy(to + t * padded, from + t * stride, size * sizeof(float));
    std::fill(to + t * padded + size, to + (t + 1) * padded, 0.0f);
  }
}

// The same as [size, padded]: a row for each channel.
static void PackTransposed(int64_t n, int64_t size, int64_t padded, const float* from, int64_t stride, float* to) {
  for (int64_t h = 0; h < size; ++h) {
    for (int64_t t = 0; t < n; ++t) to[h * padded + t] = from[t * stride + h];
    std::fill(to + h * padded + n, to + (h + 1) * padded, 0.0f);
  }
}

struct Sizes {
  int64_t B, T, N, K, H, V;  // rows, tokens, query heads, key/value heads, sizes of a key and of a value
  int64_t window;            // tokens that a query attends to, itself included
  float scale, softcap;      // softcap 0: no cap
  const int32_t* segments;   // [B, T]; nullptr: one document per row

  Sizes(const Floats& q, const Floats& k, const Floats& v, const Ints& ids, float scale, int64_t window, float softcap)
      : B(q.dimensions()[0]), T(q.dimensions()[1]), N(q.dimensions()[2]), K(k.dimensions()[2]), H(q.dimensions()[3]),
        V(v.dimensions()[3]), window(window ? window : T), scale(scale), softcap(softcap),
        segments(ids.element_count() ? ids.typed_data() : nullptr) {}
  int64_t First(int64_t t) const { return std::max<int64_t>(0, t + 1 - window); }
};

// The scores of queries t to t + rows with keys from `first` on, [rows, width]: capped, and -inf where they do not attend.
// slopes: the cap's derivative, or nullptr.
static void Score(const Sizes& s, int64_t b, int64_t t, int64_t rows, int64_t first, int64_t width, const float* q,
                  const float* keys_HS, int64_t padded, float* scores, float* slopes) {
  Multiply(rows, width, s.H, q, s.N * s.H, 1, keys_HS + first, padded, scores, width);
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < rows; ++i) {
    float* row = scores + i * width;
    for (int64_t j = 0; j < width; j += kWidth) {
      Vector x = At(row + j) * s.scale;
      if (s.softcap != 0.0f) {
        const Vector y = Tanh(x / s.softcap);
        if (slopes) At(slopes + i * width + j) = 1.0f - y * y;
        x = y * s.softcap;
      }
      At(row + j) = x;
    }
    const int64_t begin = s.First(t + i) - first, end = t + i + 1 - first;
    std::fill(row, row + begin, kNone);
    std::fill(row + end, row + width, kNone);
    if (s.segments) {
      const int32_t* ids = s.segments + b * s.T + first;
      const int32_t own = ids[t + i - first];
      for (int64_t j = begin; j < end; ++j) row[j] = ids[j] == own ? row[j] : kNone;
    }
  }
}

// Keys that a block of queries reads: [first, first + width), where the width is whole vectors.
struct Range {
  int64_t rows, first, width;
  Range(const Sizes& s, int64_t t) {
    rows = std::min(kQueries, s.T - t);
    first = s.First(t) / kWidth * kWidth;
    width = RoundUp(t + rows - first);
  }
};

static void Forward(const Sizes& s, int64_t task, const float* q, const float* k, const float* v, float* out,
                    float* lse) {
  const int64_t b = task / s.K, head = task % s.K, G = s.N / s.K, padded = RoundUp(s.T), Vp = RoundUp(s.V);
  Scratch scratch(s.H * padded + padded * Vp + kQueries * (padded + kWidth + Vp) + 256);
  float* keys_HS = scratch.Take(s.H * padded);
  float* values = scratch.Take(padded * Vp);
  float* scores = scratch.Take(kQueries * (padded + kWidth));
  float* mixed = scratch.Take(kQueries * Vp);
  PackTransposed(s.T, s.H, padded, k + (b * s.T * s.K + head) * s.H, s.K * s.H, keys_HS);
  Pack(s.T, s.V, Vp, v + (b * s.T * s.K + head) * s.V, s.K * s.V, values);
  std::fill(values + s.T * Vp, values + padded * Vp, 0.0f);
  for (int64_t n = head * G; n < (head + 1) * G; ++n) {
    for (int64_t t = 0; t < s.T; t += kQueries) {
      const Range r(s, t);
      Score(s, b, t, r.rows, r.first, r.width, q + ((b * s.T + t) * s.N + n) * s.H, keys_HS, padded, scores, nullptr);
      float sums[kQueries];
      for (int64_t i = 0; i < r.rows; ++i) {
        float* row = scores + i * r.width;
        Vector top = At(row);
        for (int64_t j = kWidth; j < r.width; j += kWidth) top = At(row + j) > top ? At(row + j) : top;
        float most = top[0];
        for (int j = 1; j < kWidth; ++j) most = std::max(most, top[j]);
        Vector sum = {};
        for (int64_t j = 0; j < r.width; j += kWidth) sum += At(row + j) = Exp(At(row + j) - most);
        float total = 0.0f;
        for (int j = 0; j < kWidth; ++j) total += sum[j];
        sums[i] = total;
        lse[(b * s.N + n) * s.T + t + i] = most + std::log(total);
      }
      Multiply(r.rows, Vp, r.width, scores, r.width, 1, values + r.first * Vp, Vp, mixed, Vp);
      for (int64_t i = 0; i < r.rows; ++i) {
        float* to = out + ((b * s.T + t + i) * s.N + n) * s.V;
        const float each = 1.0f / sums[i];
        for (int64_t h = 0; h < s.V; ++h) to[h] = mixed[i * Vp + h] * each;
      }
    }
  }
}

static void Backward(const Sizes& s, int64_t task, const float* q, const float* k, const float* v, const float* out,
                     const float* lse, const float* dout, float* dq, float* dk, float* dv) {
  const int64_t b = task / s.K, head = task % s.K, G = s.N / s.K, padded = RoundUp(s.T);
  const int64_t Hp = RoundUp(s.H), Vp = RoundUp(s.V), widest = padded + kWidth;
  Scratch scratch((s.H + s.V + 2 * Hp + Vp) * padded + kQueries * (3 * widest + 2 * Hp + Vp) + 1024);
  float* keys_HS = scratch.Take(s.H * padded);
  float* values_VS = scratch.Take(s.V * padded);
  float* keys = scratch.Take(padded * Hp);
  float* dkeys = scratch.Take(padded * Hp);
  float* dvalues = scratch.Take(padded * Vp);
  float* weights = scratch.Take(kQueries * widest);
  float* dscores = scratch.Take(kQueries * widest);
  float* slopes = scratch.Take(kQueries * widest);
  float* queries = scratch.Take(kQueries * Hp);
  float* dqueries = scratch.Take(kQueries * Hp);
  float* douts = scratch.Take(kQueries * Vp);
  const float* of_keys = k + (b * s.T * s.K + head) * s.H;
  PackTransposed(s.T, s.H, padded, of_keys, s.K * s.H, keys_HS);
  PackTransposed(s.T, s.V, padded, v + (b * s.T * s.K + head) * s.V, s.K * s.V, values_VS);
  Pack(s.T, s.H, Hp, of_keys, s.K * s.H, keys);
  std::fill(keys + s.T * Hp, keys + padded * Hp, 0.0f);
  std::fill(dkeys, dkeys + padded * Hp, 0.0f);
  std::fill(dvalues, dvalues + padded * Vp, 0.0f);
  for (int64_t n = head * G; n < (head + 1) * G; ++n) {
    for (int64_t t = 0; t < s.T; t += kQueries) {
      const Range r(s, t);
      const int64_t at = (b * s.T + t) * s.N + n;
      Score(s, b, t, r.rows, r.first, r.width, q + at * s.H, keys_HS, padded, weights, slopes);
      Multiply(r.rows, r.width, s.V, dout + at * s.V, s.N * s.V, 1, values_VS + r.first, padded, dscores, r.width);
      for (int64_t i = 0; i < r.rows; ++i) {
        const float *a = out + (at + i * s.N) * s.V, *d = dout + (at + i * s.N) * s.V;
        float mean = 0.0f;  // of the weights' gradients, by the weights
        for (int64_t h = 0; h < s.V; ++h) mean += a[h] * d[h];
        const float of_row = lse[(b * s.N + n) * s.T + t + i];
        for (int64_t j = i * r.width; j < (i + 1) * r.width; j += kWidth) {
          const Vector p = Exp(At(weights + j) - of_row);
          Vector ds = p * (At(dscores + j) - mean) * s.scale;
          if (s.softcap != 0.0f) ds *= At(slopes + j);
          At(weights + j) = p;
          At(dscores + j) = ds;
        }
      }
      Pack(r.rows, s.H, Hp, q + at * s.H, s.N * s.H, queries);
      Pack(r.rows, s.V, Vp, dout + at * s.V, s.N * s.V, douts);
      Multiply(r.rows, Hp, r.width, dscores, r.width, 1, keys + r.first * Hp, Hp, dqueries, Hp);
      Multiply(r.width, Hp, r.rows, dscores, 1, r.width, queries, Hp, dkeys + r.first * Hp, Hp, true);
      Multiply(r.width, Vp, r.rows, weights, 1, r.width, douts, Vp, dvalues + r.first * Vp, Vp, true);
      for (int64_t i = 0; i < r.rows; ++i)
        std::memcpy(dq + (at + i * s.N) * s.H, dqueries + i * Hp, s.H * sizeof(float));
    }
  }
  for (int64_t t = 0; t < s.T; ++t) {
    const int64_t at = (b * s.T + t) * s.K + head;
    std::memcpy(dk + at * s.H, dkeys + t * Hp, s.H * sizeof(float));
    std::memcpy(dv + at * s.V, dvalues + t * Vp, s.V * sizeof(float));
  }
}

// Run tasks 0 to count on XLA's threads. The caller takes tasks too, and waits only for what others have begun.
template <typename Run>
static void ForAll(ffi::ThreadPool& pool, int64_t count, const Run& run) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  auto state = std::make_shared<State>();
  auto work = [state, count, &run] {
    for (int64_t i; (i = state->next.fetch_add(1)) < count;) {
      run(i);  // no task is left when the caller has returned, so that `run` is not used after its time
      if (state->done.fetch_add(1) + 1 == count) {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->all_done.notify_one();
      }
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(work)(work));
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done.load() == count; });
}

static ffi::Error ForwardCall(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Ints ids, ffi::Result<Floats> out,
                              ffi::Result<Floats> lse, float scale, int64_t window, float softcap) {
  const Sizes s(q, k, v, ids, scale, window, softcap);
  ForAll(pool, s.B * s.K, [&](int64_t task) {
    Forward(s, task, q.typed_data(), k.typed_data(), v.typed_data(), out->typed_data(), lse->typed_data());
  });
  return ffi::Error::Success();
}

static ffi::Error BackwardCall(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Ints ids, Floats out, Floats lse,
                               Floats dout, ffi::Result<Floats> dq, ffi::Result<Floats> dk, ffi::Result<Floats> dv,
                               float scale, int64_t window, float softcap) {
  const Sizes s(q, k, v, ids, scale, window, softcap);
  ForAll(pool, s.B * s.K, [&](int64_t task) {
    Backward(s, task, q.typed_data(), k.typed_data(), v.typed_data(), out.typed_data(), lse.typed_data(),
             dout.typed_data(), dq->typed_data(), dk->typed_data(), dv->typed_data());
  });
  return ffi::Error::Success();
}

// What both calls begin with: threads, queries, keys, values, and the document of each token.
static auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Ints>(); }

// And what they end with.
template <typename Binding>
static auto WithAttributes(Binding binding) {
  return std::move(binding).template Attr<float>("scale").template Attr<int64_t>("window").template Attr<float>("softcap");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(attention_forward, ForwardCall, WithAttributes(Bind().Ret<Floats>().Ret<Floats>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    attention_backward, BackwardCall,
    WithAttributes(Bind().Arg<Floats>().Arg<Floats>().Arg<Floats>().Ret<Floats>().Ret<Floats>().Ret<Floats>()));

constexpr int kMostRows = 8;      // of x at once
constexpr int64_t kOutputs = 64;  // of a task

// sums[u] = values [D] x [u, D], for a row of the matrix and kRows of x, each `depth` bytes that are 128 too large.
template <int kRows>
static void Dot(int64_t depth, const int8_t* values, const uint8_t* x, int32_t* sums) {
  int64_t d = 0;
  int32_t sum[kRows] = {}, total = 0;
#if defined(__AVX512VNNI__)  // its instruction multiplies bytes without a sign by bytes with one
  __m512i lanes[kRows] = {}, all = {};
  for (; d + 64 <= depth; d += 64) {
    const __m512i row = _mm512_loadu_si512(values + d);
    all = _mm512_dpbusd_epi32(all, _mm512_set1_epi8(1), row);
#pragma GCC unroll 8
    for (int u = 0; u < kRows; ++u) lanes[u] = _mm512_dpbusd_epi32(lanes[u], _mm512_loadu_si512(x + u * depth + d), row);
  }
  total = _mm512_reduce_add_epi32(all);
#pragma GCC unroll 8
  for (int u = 0; u < kRows; ++u) sum[u] = _mm512_reduce_add_epi32(lanes[u]);
#endif
  for (; d < depth; ++d) {
    const int16_t each = values[d];
    total += each;
#pragma GCC unroll 8
    for (int u = 0; u < kRows; ++u) sum[u] += int32_t(each) * int16_t(x[u * depth + d]);
  }
  for (int u = 0; u < kRows; ++u) sums[u] = sum[u] - 128 * total;
}

static ffi::Error ProductCall(ffi::ThreadPool pool, Bytes values, Bytes x, ffi::Result<Ints> y) {
  const int64_t F = values.dimensions()[0], D = values.dimensions()[1], U = x.dimensions()[0];
  constexpr decltype(&Dot<1>) dots[] = {Dot<1>, Dot<2>, Dot<3>, Dot<4>, Dot<5>, Dot<6>, Dot<7>, Dot<8>};
  Scratch scratch(U * D / 4 + 1);
  uint8_t* raised = reinterpret_cast<uint8_t*>(scratch.Take(U * D / 4 + 1));
  std::transform(x.typed_data(), x.typed_data() + U * D, raised, [](int8_t each) { return each + 128; });
  ForAll(pool, (F + kOutputs - 1) / kOutputs, [&](int64_t task) {
    for (int64_t u = 0; u < U; u += kMostRows) {
      const auto dot = dots[std::min<int64_t>(U - u, kMostRows) - 1];
      for (int64_t f = task * kOutputs; f < std::min(F, (task + 1) * kOutputs); ++f)
        dot(D, values.typed_data() + f * D, raised + u * D, y->typed_data() + f * U + u);
    }
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(product, ProductCall,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bytes>().Arg<Bytes>().Ret<Ints>());
