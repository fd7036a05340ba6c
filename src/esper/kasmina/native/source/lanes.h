// Rows of lanes: the examples of a batch side by side, so that whatever is done to one of them is done to all.
//
//     activation   [rows][stride]     row = one number of every example, lane = one example
//                                     stride = lanes rounded up to 16; what lies beyond the lanes is always zero
//
// Loops over lanes have no dependence and no branch, and the compiler turns them into vectors.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define ESPER_EACH_LANE _Pragma("omp simd") for (int lane = 0; lane < lanes; ++lane)

namespace esper {

// Vectors of 64 bytes; the compiler splits them where the processor has narrower ones.
template <class T> struct Wide;
template <> struct Wide<float> { typedef float type __attribute__((vector_size(64))); };
template <> struct Wide<double> { typedef double type __attribute__((vector_size(64))); };
template <class T> using wide = typename Wide<T>::type;
template <class T> constexpr int width() { return 64 / sizeof(T); }

template <class T> inline wide<T> load(const T* from) {
    wide<T> value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T> inline void store(T* to, wide<T> value) { std::memcpy(to, &value, sizeof value); }

// Stores what belongs to lanes, and zero beyond them.
template <class T> inline void store_lanes(T* to, wide<T> value, int lanes_left) {
    for (int i = lanes_left < 0 ? 0 : lanes_left; i < width<T>(); ++i) value[i] = T(0);
    store<T>(to, value);
}

template <class T> inline T total(wide<T> value) {
    T sum = T(0);
    for (int i = 0; i < width<T>(); ++i) sum += value[i];
    return sum;
}

template <class T> inline T sum_of(const T* row, int lanes) {
    T sum = T(0);
#pragma omp simd reduction(+ : sum)
    for (int lane = 0; lane < lanes; ++lane) sum += row[lane];
    return sum;
}

// exp, tanh and sigmoid without calls, so that they vectorize. The polynomials are those of Cephes (Moshier), which
// are right to about one unit in the last place of a float; double precision, which is for tests, calls the C library.
inline float exp_of(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const float n = (x * 1.44269504088896341f + shift) - shift;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n == n ? n : 0.0f) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

inline float tanh_of(float x) {
    const float size = std::fabs(x), square = x * x;
    float p = -5.70498872745e-3f;
    p = p * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    const float near = p * square * x + x;
    const float far = 1.0f - 2.0f / (exp_of(2.0f * size) + 1.0f);
    return size <= 0.625f ? near : std::copysign(far, x);
}

inline double exp_of(double x) { return std::exp(x); }
inline double tanh_of(double x) { return std::tanh(x); }
template <class T> inline T sigmoid_of(T x) { return T(1) / (T(1) + exp_of(-x)); }

// Not max(x, 0): what is not a number must stay so.
template <class T> inline T relu_of(T x) { return x <= T(0) ? T(0) : x; }

}  // namespace esper
