// exp and tanh of floats without calls and branches, so that loops over lanes are vectorized; accurate to a few
// units in the last place.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace esper {

template <class To, class From> inline To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Polynomial of Cephes (Moshier).
inline float exp_of(float x) {
    const float highest = 88.72283f, lowest = -86.0f;
    float bounded = x > highest ? highest : x;
    bounded = bounded < lowest ? lowest : bounded;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const float shifted = bounded * 1.44269504088896341f + shift, n = shifted - shift;
    const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // n is in the low bits of `shifted`; 2^n is computed as two factors, because 2^128 overflows
    const float half_power = bits_of<float>((bits_of<uint32_t>(shifted) << 23) + (126u << 23));
    float value = p * half_power * 2.0f;
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

}  // namespace esper
