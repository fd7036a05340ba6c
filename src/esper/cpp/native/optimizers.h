// Optimizer steps of a row of weights (esper.kasmina.parameters.optimizers), and gradient clipping.

#pragma once

#include "lanes.h"

namespace esper {

// n = {numbers}: the sum of squares, in double precision because rows are long; flag: added to what is there.
template <class T> void run_SQUARE_NORM(const Call<T>& c) {
    const int64_t count = c.n[0];
    const T* grad = c.p[0];
    double squares = c.flag ? double(*c.p[1]) : 0.0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < count; ++i) squares += double(grad[i]) * double(grad[i]);
    *c.p[1] = T(squares);
}

// A sum of squares becomes the factor that limits the norm to number[0].
template <class T> void run_CLIP(const Call<T>& c) {
    const T factor = T(c.number[0]) / (std::sqrt(*c.p[0]) + T(1e-6));
    *c.p[0] = factor > T(1) ? T(1) : factor;
}

template <class T> struct Rates {
    T rate, decay, first, second, epsilon;  // momentum is `first`
    explicit Rates(const Call<T>& c)
        : rate(T(c.number[0]) * *c.p[0]), decay(T(c.number[1])), first(T(c.number[2])), second(T(c.number[3])),
          epsilon(T(c.number[4])) {}
};

// g := factor g + decay w;  m := mu m + g;  w := w - rate m. `mask` (null: none) marks the elements that decay.
template <class T>
void sgd(int64_t count, Rates<T> r, T factor, const T* grad, const T* mask, T* weight, T* momentum) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const T decayed = mask ? factor * grad[i] + weight[i] * (mask[i] * r.decay) : factor * grad[i];
        momentum[i] = r.first * momentum[i] + decayed;
        weight[i] -= r.rate * momentum[i];
    }
}

// Adam: g := g + decay w, if `coupled`. AdamW otherwise: w := w - rate decay w. Then w := w - rate (m / c1) / (sqrt(v / c2) + epsilon), with c = 1 - beta^steps.
template <class T>
void adamw(int64_t count, bool coupled, Rates<T> r, T factor, const T* grad, const T* mask, T* weight, T* mean,
           T* square, int64_t* steps) {
    *steps += 1;
    const double c1 = 1.0 - std::pow(double(r.first), double(*steps));
    const double c2 = 1.0 - std::pow(double(r.second), double(*steps));
    const T added = coupled ? r.decay : T(0), shrunk = coupled ? T(0) : r.rate * r.decay;
    const T wider = T(c1 / std::sqrt(c2)), least = T(double(r.epsilon) * c1);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const T g = mask ? factor * grad[i] + weight[i] * (mask[i] * added) : factor * grad[i];
        const T decayed = mask ? weight[i] * (T(1) - mask[i] * shrunk) : weight[i];
        mean[i] += (T(1) - r.first) * (g - mean[i]);
        square[i] = r.second * square[i] + (T(1) - r.second) * g * g;
        weight[i] = decayed - r.rate * mean[i] / (std::sqrt(square[i]) * wider + least);
    }
}

// n = {weights}
template <class T> void run_SGD(const Call<T>& c) {
    sgd<T>(c.n[0], Rates<T>(c), *c.p[1], c.p[2], c.p[3], c.p[4], c.p[5]);
}
template <class T> void run_ADAMW(const Call<T>& c) {
    adamw<T>(c.n[0], c.flag, Rates<T>(c), *c.p[1], c.p[2], c.p[3], c.p[4], c.p[5], c.p[6], c.template as<int64_t>(7));
}

}  // namespace esper
