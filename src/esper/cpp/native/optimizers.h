// Optimizer steps of a row of weights (esper.kasmina.parameters.optimizers), and gradient clipping.

#pragma once

#include "lanes.h"

namespace esper {

// Sum of squares, in double precision because rows are long; added to `sum`, or overwriting it.
template <class T> void square_norm(int64_t count, const T* grad, bool add, T* sum) {
    double squares = add ? double(*sum) : 0.0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < count; ++i) squares += double(grad[i]) * double(grad[i]);
    *sum = T(squares);
}

// The factor that limits the norm to `most`.
template <class T> T clip_factor(T squares, T most) {
    const T factor = most / (std::sqrt(squares) + T(1e-6));
    return factor > T(1) ? T(1) : factor;
}

template <class T> struct Rates {
    T rate, decay, first, second, epsilon;  // momentum is `first`

    Rates times(T factor) const { return {rate * factor, decay, first, second, epsilon}; }
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

template <class T> Rates<T> rates_of(const Call<T>& c) {
    const double* r = c.number;
    return Rates<T>{T(r[0]), T(r[1]), T(r[2]), T(r[3]), T(r[4])}.times(*c.p[0]);
}

// n = {weights}
template <class T> void run_SQUARE_NORM(const Call<T>& c) { square_norm<T>(c.n[0], c.p[0], c.flag, c.p[1]); }
template <class T> void run_CLIP(const Call<T>& c) { *c.p[0] = clip_factor<T>(*c.p[0], T(c.number[0])); }
template <class T> void run_SGD(const Call<T>& c) {
    sgd<T>(c.n[0], rates_of(c), *c.p[1], c.p[2], c.p[3], c.p[4], c.p[5]);
}
template <class T> void run_ADAMW(const Call<T>& c) {
    adamw<T>(c.n[0], c.flag, rates_of(c), *c.p[1], c.p[2], c.p[3], c.p[4], c.p[5], c.p[6], c.template as<int64_t>(7));
}

}  // namespace esper
