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

// Halves are added to each other, so that few additions wait for one another.
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

// exp, tanh and sigmoid without calls, so that they vectorize; right to a few units in the last place of a float. The
// polynomial of exp is that of Cephes (Moshier). Double precision, which is for tests, calls the C library.
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

// A quotient of polynomials, the one that Eigen takes; beyond the limit it is 1 to the last bit.
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

inline double exp_of(double x) { return std::exp(x); }
inline double tanh_of(double x) { return std::tanh(x); }
template <class T> inline T sigmoid_of(T x) { return T(1) / (T(1) + exp_of(-x)); }

// Not max(x, 0): what is not a number must stay so.
template <class T> inline T relu_of(T x) { return x <= T(0) ? T(0) : x; }

}  // namespace esper
