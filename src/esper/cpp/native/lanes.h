// Rows of lanes: the examples of a batch side by side, so that one vector instruction works on many examples.
//
//     activation   [rows][stride]     row = one number of every example, lane = one example
//                                     stride = lanes rounded up to LANES; numbers beyond the lanes are always zero
//
// Iterations of a loop over lanes are independent and free of branches, so the compiler vectorizes it.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#define ESPER_EACH_LANE _Pragma("omp simd") for (int lane = 0; lane < lanes; ++lane)

namespace esper {

// Vectors as long as the processor's: the compiler splits longer ones badly. `REGISTERS` of them hold sums.
#if defined(__AVX512F__)
constexpr int BYTES = 64, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int BYTES = 32, REGISTERS = 16;
#else
constexpr int BYTES = 16, REGISTERS = 16;
#endif
// A vector of floats, or two short ones; not more, because numbers beyond the lanes are computed, too.
constexpr int LANES = BYTES == 64 ? 16 : 8;
template <class T> struct Wide;
template <> struct Wide<float> { typedef float type __attribute__((vector_size(BYTES))); };
template <> struct Wide<double> { typedef double type __attribute__((vector_size(BYTES))); };
template <class T> using wide = typename Wide<T>::type;
template <class T> constexpr int width() { return BYTES / sizeof(T); }

// The examples of a batch that pass through the layers together, so that their features stay in the cache.
struct Chunk {
    int lanes, stride;
    int before, batch;  // examples of the batch before this chunk, and in all chunks
    double weight;      // labels of the batch that count
    int64_t number;     // of the batch in its pass
    bool first() const { return before == 0; }
    bool last() const { return before + lanes == batch; }
};

// Layers that need a sum over the whole batch: one half computes it, chunk by chunk, the other one uses it.
enum Half { SUMS_OF_BATCH = 1, FEATURES = 2, BOTH = 3 };

constexpr int SIZES = 26, NUMBERS_GIVEN = 6, OPERANDS = 12;

// Working memory: rows of lanes of each chunk, those that all chunks share, single numbers, and memory of one
// instruction. Then what each example of a batch has; `Pass` may gather inputs and labels. Then the keys of masks of
// dropout, those of one batch after those of another.
enum Space : int32_t {
    NOTHING = -1, ROWS, LOCAL, NUMBERS, SCRATCH, INPUTS, LABELS, OUTPUTS, OUT_GRADS, IN_GRADS, KEYS
};

struct Instruction {
    int32_t operation, flag;
    int32_t size[SIZES];
    double number[NUMBERS_GIVEN];
    int32_t space[OPERANDS];
    int64_t offset[OPERANDS], extent[OPERANDS];  // rows in ROWS and LOCAL, elements elsewhere
};

// An instruction with the addresses of its operands (null: none). Operation X is the function run_X.
template <class T> struct Call {
    const int32_t* n;
    int32_t flag;
    const double* number;
    T* p[OPERANDS];
    int half;
    Chunk chunk;
    template <class U> U* as(int k) const { return reinterpret_cast<U*>(p[k]); }
};

template <class T> inline wide<T> load(const T* from) {
    wide<T> value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T> inline void store(T* to, wide<T> value) { std::memcpy(to, &value, sizeof value); }

// Into a register: where those are scarce, the compiler would read the vector again for each product, and a core reads no
// more vectors than it multiplies.
template <class T> inline wide<T> load_once(const T* from) {
    wide<T> value = load(from);
#if defined(__x86_64__)
    asm("" : "+v"(value));
#endif
    return value;
}

// Stores the lanes, and zero beyond them.
template <class T> inline void store_lanes(T* to, wide<T> value, int lanes_left) {
    for (int i = lanes_left < 0 ? 0 : lanes_left; i < width<T>(); ++i) value[i] = T(0);
    store<T>(to, value);
}

template <int K> using Constant = std::integral_constant<int, K>;

// Calls f(size, begin) for pieces of `count`, each of the largest size that fits. Sizes are known to the compiler.
template <int SIZE, int... SMALLER, class F> inline void in_pieces(int count, F f, int begin = 0) {
    for (; begin + SIZE <= count; begin += SIZE) f(Constant<SIZE>{}, begin);
    if constexpr (sizeof...(SMALLER) > 0) in_pieces<SMALLER...>(count, f, begin);
}

// A tree of additions, of which few depend on each other.
template <class T> inline T total(wide<T> value) {
    T part[width<T>()];
    store<T>(part, value);
    for (int half = width<T>() / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) part[i] += part[i + half];
    return part[0];
}

template <class T> inline T sum_of(const T* row, int lanes) {
    T sum = T(0);
#pragma omp simd reduction(+ : sum)
    for (int lane = 0; lane < lanes; ++lane) sum += row[lane];
    return sum;
}

// -- exp and tanh of floats: no calls, no branches, accurate to a few units in the last place -----------------------------

template <class To, class From> inline To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// exp(x) = 2^n (1 + rest), for x that is in bounds; the low bits of `bits` are n. Polynomial of Cephes (Moshier).
struct Exponential {
    uint32_t bits;
    float rest;
};

inline Exponential exponential(float x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const float shifted = x * 1.44269504088896341f + shift, n = shifted - shift;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return {bits_of<uint32_t>(shifted), p * r * r + r};
}

inline float exp_of(float x) {
    const float highest = 88.72283f, lowest = -86.0f;
    float bounded = x > highest ? highest : x;
    bounded = bounded < lowest ? lowest : bounded;
    const Exponential parts = exponential(bounded);
    // 2^n is computed as two factors, because 2^128 overflows
    const float half_power = bits_of<float>((parts.bits << 23) + (126u << 23));
    float value = (parts.rest + 1.0f) * half_power * 2.0f;
    value = x < lowest ? 0.0f : value;
    return x > highest ? std::numeric_limits<float>::infinity() : value;
}

// Eigen's rational approximation; beyond the limit it is 1 to the last bit.
inline float tanh_of(float x) {
    const float limit = 7.90531110763549805f;
    x = x > limit ? limit : x;
    x = x < -limit ? -limit : x;
    const float square = x * x;
    float p = -2.76076847742355e-16f;
    p = p * square + 2.00018790482477e-13f;
    p = p * square - 8.60467152213735e-11f;
    p = p * square + 5.12229709037114e-08f;
    p = p * square + 1.48572235717979e-05f;
    p = p * square + 6.37261928875436e-04f;
    p = p * square + 4.89352455891786e-03f;
    float q = 1.19825839466702e-06f;
    q = q * square + 1.18534705686654e-04f;
    q = q * square + 2.26843463243900e-03f;
    q = q * square + 4.89352518554385e-03f;
    return p * x / q;
}

// Double precision (tests and trials) calls the C library.
inline double exp_of(double x) { return std::exp(x); }
inline double tanh_of(double x) { return std::tanh(x); }
template <class T> inline T sigmoid_of(T x) { return T(1) / (T(1) + exp_of(-x)); }

// Not max(x, 0): NaN must stay NaN.
template <class T> inline T relu_of(T x) { return x <= T(0) ? T(0) : x; }

// Full rows of lanes that are treated alike are one long row.
inline void merge_rows(int& rows, int& lanes, int& stride) {
    if (lanes != stride) return;
    lanes = stride = rows * stride;
    rows = 1;
}

// Whether `later` replaces `first` as the maximum: NaN wins, and the first of equals.
template <class T> inline bool later_wins(T first, T later) {
    return later > first || (later != later && first == first);
}

}  // namespace esper
