// Functions of one number, written so that a loop over lanes becomes vectors: choices instead of branches, no calls.
// They answer as those of PyTorch do for zero, infinity and what is not a number, and agree to a few units in the last
// place elsewhere. What is rare calls the C library.

#pragma once

#include "../../../cpp/native/curves.h"  // of the native executor

namespace esper {

constexpr double INF_D = std::numeric_limits<double>::infinity();

// Taylor to the 13th power over half of ln 2, which is exact to the last bit but one.
inline double exp_of(double x) {
    const double highest = 709.782712893384, lowest = -707.0;
    double bounded = x > highest ? highest : x;
    bounded = bounded < lowest ? lowest : bounded;
    const double shift = 6755399441055744.0;  // 1.5 * 2^52
    const double shifted = bounded * 1.4426950408889634074 + shift, n = shifted - shift;
    const double r = (bounded - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
    double p = 1.6059043836821613e-10;
    p = p * r + 2.0876756987868100e-09;
    p = p * r + 2.5052108385441720e-08;
    p = p * r + 2.7557319223985893e-07;
    p = p * r + 2.7557319223985888e-06;
    p = p * r + 2.4801587301587302e-05;
    p = p * r + 1.9841269841269841e-04;
    p = p * r + 1.3888888888888889e-03;
    p = p * r + 8.3333333333333332e-03;
    p = p * r + 4.1666666666666664e-02;
    p = p * r + 1.6666666666666666e-01;
    p = p * r + 0.5;
    p = p * r * r + r + 1.0;
    const double half_power = bits_of<double>((bits_of<uint64_t>(shifted) << 52) + (uint64_t(1022) << 52));
    double value = p * half_power * 2.0;
    value = x < lowest ? 0.0 : value;
    return x > highest ? INF_D : value;
}

// x = 2^e m with m about 1; ln m = 2 atanh((m - 1) / (m + 1)) as a series.
inline double log_of(double x) {
    const bool tiny = x < 2.2250738585072014e-308;
    const double whole = tiny ? x * 18014398509481984.0 : x;  // 2^54
    const uint64_t bits = bits_of<uint64_t>(whole);
    const uint64_t above = bits - 0x3fe6a09e667f3bcdULL;  // bits of the root of 1/2
    const uint64_t exponent = (above >> 52) & 0xfff;
    // a sign of 12 bits, as a double by way of its last bits
    const double e = bits_of<double>(0x4330000000000000ULL | ((exponent + 0x800) & 0xfff)) - 4503599627370496.0 - 2048.0;
    const double m = bits_of<double>(bits - (above & 0xfff0000000000000ULL));
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double p = 1.0 / 25;
    p = p * z + 1.0 / 23;
    p = p * z + 1.0 / 21;
    p = p * z + 1.0 / 19;
    p = p * z + 1.0 / 17;
    p = p * z + 1.0 / 15;
    p = p * z + 1.0 / 13;
    p = p * z + 1.0 / 11;
    p = p * z + 1.0 / 9;
    p = p * z + 1.0 / 7;
    p = p * z + 1.0 / 5;
    p = p * z + 1.0 / 3;
    const double of_m = 2.0 * s + 2.0 * s * z * p, twos = e - (tiny ? 54.0 : 0.0);
    double value = twos * 6.93147180369123816490e-01 + (of_m + twos * 1.90821492927058770002e-10);
    value = x == 0.0 ? -INF_D : value;
    value = x == INF_D ? INF_D : value;
    return x >= 0.0 ? value : std::numeric_limits<double>::quiet_NaN();
}

inline float log_of(float x) { return float(log_of(double(x))); }

inline double log1p_of(double x) {
    const double u = 1.0 + x, value = log_of(u) + (x - (u - 1.0)) / u;
    return u == 1.0 ? x : (u == INF_D || u == 0.0 ? log_of(u) : value);
}

inline float log1p_of(float x) { return float(log1p_of(double(x))); }

inline double tanh_of(double x) { return std::tanh(x); }

template <class T> inline T sigmoid_of(T x) { return T(1) / (T(1) + exp_of(-x)); }
template <class T> inline T power_of(T x, T y) { return std::pow(x, y); }
inline float size_of(float x) { return std::fabs(x); }  // also of -0
inline double size_of(double x) { return std::fabs(x); }
inline int64_t size_of(int64_t x) { return x < 0 ? -x : x; }
template <class T> inline T sign_of(T x) { return T(x > T(0)) - T(x < T(0)); }

// What is not a number wins.
template <class T> inline T least(T a, T b) { return (a < b || a != a) ? a : b; }
template <class T> inline T most(T a, T b) { return (a > b || a != a) ? a : b; }
// What is a number wins.
template <class T> inline T least_number(T a, T b) { return (a < b || b != b) ? a : b; }
template <class T> inline T most_number(T a, T b) { return (a > b || b != b) ? a : b; }

// The remainder has the sign of the divisor, as in Python.
inline int64_t remainder_of(int64_t a, int64_t b) {
    const int64_t r = a % b;
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
inline int64_t floor_of_quotient(int64_t a, int64_t b) { return (a - remainder_of(a, b)) / b; }

}  // namespace esper
