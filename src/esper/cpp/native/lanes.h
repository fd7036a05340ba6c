// Rows of lanes: the examples of a batch side by side, so that one vector instruction works on many examples.
//
//     activation   [rows][stride]     row = one number of every example, lane = one example
//                                     stride = lanes rounded up to 16; numbers beyond the lanes are always zero
//
// Iterations of a loop over lanes are independent and free of branches, so the compiler vectorizes it.

#pragma once

#include "curves.h"

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

// Stores the lanes, and zero beyond them.
template <class T> inline void store_lanes(T* to, wide<T> value, int lanes_left) {
    for (int i = lanes_left < 0 ? 0 : lanes_left; i < width<T>(); ++i) value[i] = T(0);
    store<T>(to, value);
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

// Double precision (tests and trials) calls the C library.
inline double exp_of(double x) { return std::exp(x); }
inline double tanh_of(double x) { return std::tanh(x); }
template <class T> inline T sigmoid_of(T x) { return T(1) / (T(1) + exp_of(-x)); }

// Not max(x, 0): NaN must stay NaN.
template <class T> inline T relu_of(T x) { return x <= T(0) ? T(0) : x; }

}  // namespace esper
