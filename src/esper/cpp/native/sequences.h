// Sequences, on rows of lanes [T][D]: embeddings, attention, products of two activations, sums of the past, dropout.
//
// A product of two activations multiplies row by row: numbers of an example meet only numbers of the same example.
// Tiles of 4 x 4 rows stay in registers, so that each row that is read serves four products.

#pragma once

#include "lanes.h"

#include <algorithm>

// X(name, operands): see program.cpp.
#define ESPER_SEQUENCES(X)                                                                                             \
    X(EMBED, "xxx") X(EMBED_WEIGHT_GRAD, "xxx") X(ATTEND, "xxxxlxxx") X(ATTEND_BACKWARD, "xxxxxxxlxxxx")               \
    X(PRODUCT, "xxx") X(RUNNING_SUM, "xx") X(SELECT, "xxxx") X(COMPARE, "xxx")                 \
    X(DROP, "xlx")

namespace esper {

// -- embedding --------------------------------------------------------------------------------------------------------

// n = {tokens, entries of the table, numbers of each}: a token that the table lacks becomes NaN.
template <class T> void run_EMBED(const Call<T>& c) {
    constexpr int FEW = 16;  // numbers of an entry: so many rows stay in the first level of cache
    const int tokens = c.n[0], entries = c.n[1], each = c.n[2], stride = c.chunk.stride;
    for (int t = 0; t < tokens; ++t)
        for (int first = 0; first < each; first += FEW)
            for (int lane = 0; lane < c.chunk.lanes; ++lane) {
                const T token = c.p[0][int64_t(t) * stride + lane];
                const bool known = token >= T(0) && token < T(entries);
                const T* from = c.p[1] + (known ? int64_t(token) * each : 0) + first;
                const T wrong = known ? T(0) : std::numeric_limits<T>::quiet_NaN();
                T* y = c.p[2] + (int64_t(t) * each + first) * stride + lane;
                if (each - first >= FEW)
                    for (int d = 0; d < FEW; ++d) y[d * stride] = from[d] + wrong;
                else
                    for (int d = 0; d < each - first; ++d) y[d * stride] = from[d] + wrong;
            }
}

// The same; flag: the token whose entry gets no gradient, or -1. Adds in the order of tokens, then of examples.
template <class T> void run_EMBED_WEIGHT_GRAD(const Call<T>& c) {
    const int tokens = c.n[0], entries = c.n[1], each = c.n[2], stride = c.chunk.stride;
    for (int t = 0; t < tokens; ++t)
        for (int lane = 0; lane < c.chunk.lanes; ++lane) {
            const T token = c.p[0][int64_t(t) * stride + lane];
            if (!(token >= T(0) && token < T(entries)) || int32_t(token) == c.flag) continue;
            const T* g = c.p[1] + int64_t(t) * each * stride + lane;
            T* grad = c.p[2] + int64_t(token) * each;
#pragma omp simd
            for (int d = 0; d < each; ++d) grad[d] += g[d * stride];
        }
}

// -- masks of dropout (esper.kasmina.parameters.dropout) --------------------------------------------------------------

// The numbers of one mask, which is in the order [example][element]: numbers of 16 bits, four from each word.
struct Draw {
    uint64_t key;
    int64_t each;   // elements of an example
    int64_t limit;  // the smallest number of 16 bits, with sign, whose element is kept

    static uint64_t mixed(uint64_t z) {  // SplitMix64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }
};

// Reads a mask for N examples, four elements of each at a time.
template <int N> struct Reader {
    static constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
    uint64_t next[N], held[N], low[N];
    int64_t least;
    bool aligned;  // four elements are one word; else they are the end of one and the beginning of the next

    // `first`: element of the first example at which the reader begins, counted from the beginning of the mask.
    void begin(const Draw& draw, int64_t first) {
        least = draw.limit * (int64_t(1) << 48);
        aligned = draw.each % 4 == 0 && first % 4 == 0;
#pragma omp simd
        for (int l = 0; l < N; ++l) {
            const uint64_t element = first + l * draw.each;
            low[l] = (element & 3) * 16;
            next[l] = draw.key + ((element >> 2) + 1) * GOLDEN;
            held[l] = Draw::mixed(next[l]);
        }
    }

    // The numbers of four elements, the first ones in the low bits.
    void four(uint64_t* bits) {
        if (aligned) {
#pragma omp simd
            for (int l = 0; l < N; ++l) {
                bits[l] = Draw::mixed(next[l]);
                next[l] += GOLDEN;
            }
            return;
        }
#pragma omp simd
        for (int l = 0; l < N; ++l) {
            next[l] += GOLDEN;
            const uint64_t word = Draw::mixed(next[l]);
            bits[l] = held[l] >> low[l] | (word << 1) << (63 - low[l]);
            held[l] = word;
        }
    }

    // `one` for those of N examples whose element k of four is kept, else 0.
    template <class T> void kept(const uint64_t* bits, int k, T one, T* to) const {
        const int up = 48 - 16 * k;
#pragma omp simd
        for (int l = 0; l < N; ++l) to[l] = int64_t(bits[l] << up) >= least ? one : T(0);
    }
};

// n = {elements of a mask per example, rows of each}, number = {limit, factor of what is kept}. Its own backward pass.
template <class T> void run_DROP(const Call<T>& c) {
    constexpr int N = 16, READERS = 4;
    const int each = c.n[0], inner = c.n[1], lanes = c.chunk.lanes, stride = c.chunk.stride;
    const Draw draw = {uint64_t(*c.template as<int64_t>(1)), each, int64_t(c.number[0])};
    const T factor = T(c.number[1]);
    Reader<N> readers[READERS];
    uint64_t bits[N];
    T kept[N];
    for (int first = 0; first < lanes; first += N * READERS) {
        const int last = std::min(first + N * READERS, stride);
        for (int at = first; at < last; at += N)
            readers[(at - first) / N].begin(draw, int64_t(c.chunk.before + at) * each);
        for (int e = 0; e < each; e += 4)
            for (int at = first; at < last; at += N) {
                Reader<N>& reader = readers[(at - first) / N];
                reader.four(bits);
                for (int k = 0; k < std::min(4, each - e); ++k) {
                    reader.kept(bits, k, factor, kept);
                    const int64_t begin = int64_t(e + k) * inner * stride + at;
                    for (int r = 0; r < inner; ++r) {  // what is beyond the lanes is zero and stays so
                        const T* x = c.p[0] + begin + int64_t(r) * stride;
                        T* y = c.p[2] + begin + int64_t(r) * stride;
#pragma omp simd
                        for (int l = 0; l < N; ++l) y[l] = x[l] * kept[l];
                    }
                }
            }
    }
}

// -- attention --------------------------------------------------------------------------------------------------------

// exp of what is at most zero.
inline wide<float> exp_below(wide<float> x) {
    typedef int32_t bits __attribute__((vector_size(BYTES)));
    const wide<float> zero = {}, lowest = zero - 86.0f, shift = zero + 12582912.0f;  // see exp_of
    const auto under = x < lowest;
    x = under ? lowest : x;
    const wide<float> shifted = x * 1.44269504088896341f + shift, n = shifted - shift;
    const wide<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    wide<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const bits power = (bits_of<bits>(shifted) << 23) + (127 << 23);
    return under ? zero : p * bits_of<wide<float>>(power);
}

inline wide<double> exp_below(wide<double> x) {
    for (int i = 0; i < width<double>(); ++i) x[i] = std::exp(x[i]);
    return x;
}

// Queries and keys that are treated together; their scores, and the vectors of `size` 16, fit the first level of cache.
// Queries that fit the second level while a backward pass goes over the keys.
constexpr int TILE = 4, BLOCK = 16, KEYS_FORWARD = 16, KEYS_BACKWARD = 8, SECOND_LEVEL = 64;

// Rows [heads][count][size] of one head and one vector of lanes. Where rows are longer than a vector they are copied
// next to each other, because every second line of memory would use half of the cache.
template <class T> struct Packing {
    int size, stride;

    bool is_packed() const { return stride == width<T>(); }

    template <class U> U* of(U* x, int head, int count, int at) const {
        return x + int64_t(head) * count * size * stride + at;
    }

    const T* scaled(const T* x, int head, int count, int at, T factor, T*& free) const {
        x = of(x, head, count, at);
        T* to = free;
        for (int r = 0; r < count * size; ++r, free += width<T>(), x += stride) store<T>(free, load(x) * factor);
        return to;
    }

    const T* in(const T* x, int head, int count, int at, T*& free) const {
        return is_packed() ? of(x, head, count, at) : scaled(x, head, count, at, T(1), free);
    }

    // Where sums begin at zero.
    T* out(T* x, int head, int count, int at, T*& free) const {
        const int64_t numbers = int64_t(count) * size * width<T>();
        T* to = is_packed() ? of(x, head, count, at) : free;
        if (!is_packed()) free += numbers;
        std::memset(to, 0, sizeof(T) * numbers);
        return to;
    }

    void back(const T* from, T* x, int head, int count, int at, T factor = T(1)) const {
        if (is_packed() && factor == T(1)) return;
        x = of(x, head, count, at);
        for (int r = 0; r < count * size; ++r, from += width<T>(), x += stride) store<T>(x, load(from) * factor);
    }
};

// Tiles of Q queries; their scores are [key][query] in memory, the keys of a block.
template <class T> struct Attention {
    int heads, queries, keys, size;  // `size`: numbers of a query, key or value
    bool causal;
    T scale;
    const T* mask;  // added to the scores [heads][queries][keys]; null: nothing
    int64_t per_head;  // numbers from the mask of one head to that of the next one
    const int64_t* draw;  // keys of the masks of dropout, one for each part of PART queries; null: no dropout
    int64_t limit;
    T factor;  // of weights that are kept
    int stride, before;

    static constexpr int PART = 32;
    using Scores = wide<T> (*)[TILE];

    // The last key that a query sees, and one more.
    int seen(int query) const { return causal ? std::min(keys, query + 1) : keys; }

    int64_t row(int which) const { return int64_t(which) * size * width<T>(); }

    // p[j][i] = inner product of a[i] and b[j], vectors of `size` rows.
    template <int Q> void products(const T* a, const T* b, int count, Scores p) const {
        int j = 0;
        for (; j + TILE <= count; j += TILE) products<Q, TILE>(a, b + row(j), p + j);
        for (; j < count; ++j) products<Q, 1>(a, b + row(j), p + j);
    }

    template <int Q, int K> void products(const T* a, const T* b, Scores p) const {
        wide<T> sum[Q][K] = {};
        for (int d = 0; d < size; ++d, a += width<T>(), b += width<T>()) {
            wide<T> first[Q];
            for (int i = 0; i < Q; ++i) first[i] = load(a + i * row(1));
            for (int j = 0; j < K; ++j) {
                const wide<T> second = load(b + j * row(1));
                for (int i = 0; i < Q; ++i) sum[i][j] += first[i] * second;
            }
        }
        for (int j = 0; j < K; ++j)
            for (int i = 0; i < Q; ++i) p[j][i] = sum[i][j];
    }

    // Adds the mask, and hides later keys.
    template <int Q> void hide(int head, int query, int key, int count, Scores p) const {
        for (int j = 0; mask && j < count; ++j)
            for (int i = 0; i < Q; ++i) p[j][i] += mask[head * per_head + int64_t(query + i) * keys + key + j];
        for (int j = 0; causal && j < count; ++j)
            for (int i = 0; i < Q; ++i)
                if (key + j > query + i) p[j][i] = wide<T>{} - std::numeric_limits<T>::infinity();
    }

    template <int Q> void scores(const T* q, const T* k, int head, int query, int key, int count, Scores p) const {
        products<Q>(q, k, count, p);
        if (mask || (causal && key + count - 1 > query)) hide<Q>(head, query, key, count, p);
    }

    // y[i] = factor[i] y[i] + sum_j p[j][i] v[j]
    template <int Q> void mix(Scores p, int count, const T* v, const wide<T>* factors, T* y) const {
        int d = 0;
        for (; d + TILE <= size; d += TILE) mix<Q, TILE>(p, count, v + d * width<T>(), factors, y + d * width<T>());
        for (; d < size; ++d) mix<Q, 1>(p, count, v + d * width<T>(), factors, y + d * width<T>());
    }

    template <int Q, int D> void mix(Scores p, int count, const T* v, const wide<T>* factors, T* y) const {
        wide<T> sum[Q][D];
        for (int i = 0; i < Q; ++i)
            for (int d = 0; d < D; ++d) {
                sum[i][d] = load(y + i * row(1) + d * width<T>());
                if (factors) sum[i][d] *= factors[i];
            }
        for (int j = 0; j < count; ++j, v += row(1)) {
            wide<T> value[D];
            for (int d = 0; d < D; ++d) value[d] = load(v + d * width<T>());
            for (int i = 0; i < Q; ++i) {
                const wide<T> weight = p[j][i];
                for (int d = 0; d < D; ++d) sum[i][d] += weight * value[d];
            }
        }
        for (int i = 0; i < Q; ++i)
            for (int d = 0; d < D; ++d) store<T>(y + i * row(1) + d * width<T>(), sum[i][d]);
    }

    // y[j] += sum_i p[j][i] x[i]
    template <int Q> void scatter(Scores p, int count, const T* x, T* y) const {
        int j = 0;
        for (; j + TILE <= count; j += TILE) scatter<Q, TILE>(p + j, x, y + row(j));
        for (; j < count; ++j) scatter<Q, 1>(p + j, x, y + row(j));
    }

    template <int Q, int K> void scatter(Scores p, const T* x, T* y) const {
        wide<T> weight[K][Q];
        for (int j = 0; j < K; ++j)
            for (int i = 0; i < Q; ++i) weight[j][i] = p[j][i];
        for (int d = 0; d < size; ++d, x += width<T>(), y += width<T>()) {
            wide<T> value[Q];
            for (int i = 0; i < Q; ++i) value[i] = load(x + i * row(1));
            for (int j = 0; j < K; ++j) {
                wide<T> sum = load(y + j * row(1));
                for (int i = 0; i < Q; ++i) sum += weight[j][i] * value[i];
                store<T>(y + j * row(1), sum);
            }
        }
    }

    // Multiplies weights by the mask of dropout times `one`. A mask is [example][head][query of the part][key up to the
    // end of the part].
    template <int Q> void drop(int head, int query, int key, int count, int at, T one, Scores p) const {
        constexpr int N = width<T>();
        const int first = query / PART * PART, end = std::min(first + PART, queries);
        const int64_t each = int64_t(heads) * (end - first) * end;
        const Draw part = {uint64_t(draw[query / PART]), each, limit};
        Reader<N> reader;
        uint64_t bits[N];
        T kept[N];
        for (int i = 0; i < Q; ++i) {
            const int64_t of_head = (int64_t(head) * (end - first) + query + i - first) * end + key;
            reader.begin(part, (before + at) * each + of_head);
            for (int j = 0; j < count; j += 4) {
                reader.four(bits);
                for (int k = 0; k < std::min(4, count - j); ++k) {
                    reader.kept(bits, k, one, kept);
                    p[j + k][i] *= load(kept);
                }
            }
        }
    }

    // Q queries and the keys of a block. `top` and `sum` are the largest score and the sum of exp(score - top) so far.
    template <int Q>
    void forward(const T* q, const T* k, const T* v, int head, int query, int begin, int end, int at, wide<T>* top,
                 wide<T>* sum, T* y) const {
        wide<T> p[KEYS_FORWARD][TILE], base[Q], factors[Q], more[Q];
        const int count = std::min(end, seen(query + Q - 1)) - begin;
        scores<Q>(q, k, head, query, begin, count, p);
        for (int i = 0; i < Q; ++i) base[i] = top[i];
        for (int j = 0; j < count; ++j)
            for (int i = 0; i < Q; ++i) base[i] = p[j][i] > base[i] ? p[j][i] : base[i];
        for (int i = 0; i < Q; ++i) {
            const wide<T> before = top[i];
            top[i] = base[i];
            // no key so far: any finite number will do
            base[i] = base[i] == -std::numeric_limits<T>::infinity() ? wide<T>{} : base[i];
            factors[i] = exp_below(before - base[i]);
            more[i] = sum[i] * factors[i];
        }
        for (int j = 0; j < count; ++j)
            for (int i = 0; i < Q; ++i) more[i] += p[j][i] = exp_below(p[j][i] - base[i]);
        for (int i = 0; i < Q; ++i) sum[i] = more[i];
        if (draw) drop<Q>(head, query, begin, count, at, T(1), p);
        mix<Q>(p, count, v, factors, y);
    }

    // `stats` (null: not kept) [2][heads][queries]: the largest score, and 1 / the sum of exp(score - largest).
    void run(const T* q, const T* k, const T* v, T* y, T* stats, T* scratch, int lanes) const {
        const Packing<T> pack = {size, stride};
        for (int head = 0; head < heads; ++head)
            for (int at = 0; at < stride; at += width<T>()) {
                T* free = scratch;
                const T* own_q = pack.scaled(q, head, queries, at, scale, free);
                const T* own_k = pack.in(k, head, keys, at, free);
                const T* own_v = pack.in(v, head, keys, at, free);
                T* own_y = pack.out(y, head, queries, at, free);
                for (int first = 0; first < queries; first += BLOCK) {
                    const int last = std::min(first + BLOCK, queries);
                    wide<T> top[BLOCK], sum[BLOCK] = {};
                    for (auto& x : top) x = wide<T>{} - std::numeric_limits<T>::infinity();
                    for (int begin = 0; begin < seen(last - 1); begin += KEYS_FORWARD) {
                        const int end = std::min(begin + KEYS_FORWARD, keys);
                        const T *key = own_k + row(begin), *value = own_v + row(begin);
                        each_tile(first, last, [&](auto some, int t) {
                            constexpr int Q = decltype(some)::value;
                            if (begin < seen(t + Q - 1))
                                forward<Q>(own_q + row(t), key, value, head, t, begin, end, at, top + t - first,
                                           sum + t - first, own_y + row(t));
                        });
                    }
                    for (int t = first; t < last; ++t) {
                        const wide<T> inverse = T(1) / sum[t - first], scaled = inverse * factor;
                        T* out = own_y + row(t);
                        for (int d = 0; d < size; ++d, out += width<T>()) store<T>(out, load(out) * scaled);
                        if (!stats) continue;
                        T* to = stats + (int64_t(head) * queries + t) * stride + at;
                        store_lanes<T>(to, top[t - first], lanes - at);
                        store_lanes<T>(to + int64_t(heads) * queries * stride, inverse, lanes - at);
                    }
                }
                pack.back(own_y, y, head, queries, at);
            }
    }

    // Calls f with tiles of queries from `first` to `last`.
    template <class F> static void each_tile(int first, int last, F f) {
        for (; first + TILE <= last; first += TILE) f(std::integral_constant<int, TILE>{}, first);
        for (; first < last; ++first) f(std::integral_constant<int, 1>{}, first);
    }

    // Q queries and `count` keys. `delta` [Q]: inner product of the output and its gradient.
    template <int Q>
    void backward(const T* q, const T* k, const T* v, const T* g, int head, int query, int begin, int end, int at,
                  const T* stats, const T* delta, T* grad_q, T* grad_k, T* grad_v) const {
        wide<T> p[KEYS_BACKWARD][TILE], of_score[KEYS_BACKWARD][TILE], top[Q], inverse[Q], inner[Q];
        const int count = std::min(end, seen(query + Q - 1)) - begin;
        scores<Q>(q, k, head, query, begin, count, p);
        products<Q>(g, v, count, of_score);
        if (draw) drop<Q>(head, query, begin, count, at, factor, of_score);
        for (int i = 0; i < Q; ++i) {
            const T* own = stats + (int64_t(head) * queries + query + i) * stride + at;
            top[i] = load(own), inverse[i] = load(own + int64_t(heads) * queries * stride);
            inner[i] = load(delta + i * width<T>());
        }
        if (mask)  // beyond the lanes, where `stats` is zero, a mask could be larger than the largest score
            for (int j = 0; j < count; ++j)
                for (int i = 0; i < Q; ++i) p[j][i] = p[j][i] > top[i] ? top[i] : p[j][i];
        for (int j = 0; j < count; ++j)
            for (int i = 0; i < Q; ++i) {
                p[j][i] = exp_below(p[j][i] - top[i]) * inverse[i];
                of_score[j][i] = p[j][i] * (of_score[j][i] - inner[i]);
            }
        mix<Q>(of_score, count, k, nullptr, grad_q);
        scatter<Q>(of_score, count, q, grad_k);
        if (draw) drop<Q>(head, query, begin, count, at, factor, p);
        scatter<Q>(p, count, g, grad_v);
    }

    void run_backward(const T* q, const T* k, const T* v, const T* y, const T* g, const T* stats, T* grad_q, T* grad_k,
                      T* grad_v, T* scratch) const {
        const Packing<T> pack = {size, stride};
        for (int head = 0; head < heads; ++head)
            for (int at = 0; at < stride; at += width<T>()) {
                T *delta = scratch, *free = scratch + int64_t(queries) * width<T>();
                const T* own_q = pack.scaled(q, head, queries, at, scale, free);
                const T* own_k = pack.in(k, head, keys, at, free);
                const T *own_v = pack.in(v, head, keys, at, free), *own_g = pack.in(g, head, queries, at, free);
                T *to_q = pack.out(grad_q, head, queries, at, free), *to_k = pack.out(grad_k, head, keys, at, free);
                T* to_v = pack.out(grad_v, head, keys, at, free);
                const T* out = y + int64_t(head) * queries * size * stride + at;
                for (int t = 0; t < queries; ++t) {
                    wide<T> sum = {};
                    const T* grad = own_g + row(t);
                    for (int d = 0; d < size; ++d, out += stride, grad += width<T>()) sum += load(out) * load(grad);
                    store<T>(delta + t * width<T>(), sum);
                }
                for (int first = 0; first < queries; first += SECOND_LEVEL) {
                    const int last = std::min(first + SECOND_LEVEL, queries);
                    for (int begin = 0; begin < seen(last - 1); begin += KEYS_BACKWARD) {
                        const int end = std::min(begin + KEYS_BACKWARD, keys);
                        each_tile(causal ? std::max(first, begin) : first, last, [&](auto some, int t) {
                            backward<decltype(some)::value>(own_q + row(t), own_k + row(begin), own_v + row(begin),
                                                            own_g + row(t), head, t, begin, end, at, stats,
                                                            delta + t * width<T>(), to_q + row(t), to_k + row(begin),
                                                            to_v + row(begin));
                        });
                    }
                }
                pack.back(to_q, grad_q, head, queries, at, scale);
                pack.back(to_k, grad_k, head, keys, at);
                pack.back(to_v, grad_v, head, keys, at);
            }
    }
};

// n = {heads, queries, keys, numbers of each}, flag = {1: causal, 2: a mask for each head}, number = {scale, limit and
// factor of dropout}
template <class T> Attention<T> attention_of(const Call<T>& c, const T* mask, const int64_t* draw) {
    const int64_t per_head = c.flag & 2 ? int64_t(c.n[1]) * c.n[2] : 0;
    return {c.n[0], c.n[1], c.n[2], c.n[3], (c.flag & 1) != 0, T(c.number[0]), mask, per_head, draw,
            int64_t(c.number[1]), draw ? T(c.number[2]) : T(1), c.chunk.stride, c.chunk.before};
}

template <class T> void run_ATTEND(const Call<T>& c) {
    attention_of<T>(c, c.p[3], c.template as<int64_t>(4)).run(c.p[0], c.p[1], c.p[2], c.p[5], c.p[6], c.p[7],
                                                               c.chunk.lanes);
}

template <class T> void run_ATTEND_BACKWARD(const Call<T>& c) {
    attention_of<T>(c, c.p[6], c.template as<int64_t>(7))
        .run_backward(c.p[0], c.p[1], c.p[2], c.p[3], c.p[4], c.p[5], c.p[8], c.p[9], c.p[10], c.p[11]);
}

// -- products of two activations --------------------------------------------------------------------------------------

// Q x R rows of y = a b. Strides are in numbers.
template <class T, int Q, int R>
inline void product_tile(int inner, const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_column,
                         int64_t b_step, T* y, int64_t y_row, int stride) {
    wide<T> sum[Q][R] = {};
    for (int k = 0; k < inner; ++k, a += a_step, b += b_step) {
        wide<T> first[Q];
        for (int i = 0; i < Q; ++i) first[i] = load(a + i * a_row);
        for (int j = 0; j < R; ++j) {
            const wide<T> second = load(b + j * b_column);
            for (int i = 0; i < Q; ++i) sum[i][j] += first[i] * second;
        }
    }
    for (int i = 0; i < Q; ++i)
        for (int j = 0; j < R; ++j) store<T>(y + i * y_row + j * stride, sum[i][j]);
}

// n = {matrices, rows, columns, inner size}: y = a b for each of them. flag = {1: a is transposed, 2: b is transposed}
template <class T> void run_PRODUCT(const Call<T>& c) {
    const int rows = c.n[1], columns = c.n[2], inner = c.n[3], stride = c.chunk.stride;
    const int64_t s = stride, a_row = c.flag & 1 ? s : inner * s, a_step = c.flag & 1 ? rows * s : s;
    const int64_t b_step = c.flag & 2 ? s : columns * s, b_column = c.flag & 2 ? inner * s : s, y_row = columns * s;
    for (int at = 0; at < stride; at += width<T>())
        for (int m = 0; m < c.n[0]; ++m) {
            const T* a = c.p[0] + int64_t(m) * rows * inner * s + at;
            const T* b = c.p[1] + int64_t(m) * inner * columns * s + at;
            T* y = c.p[2] + int64_t(m) * rows * columns * s + at;
            const auto tile = [&](auto q, auto r, int i, int j) {
                product_tile<T, decltype(q)::value, decltype(r)::value>(inner, a + i * a_row, a_row, a_step,
                                                                        b + j * b_column, b_column, b_step,
                                                                        y + i * y_row + j * s, y_row, stride);
            };
            const std::integral_constant<int, TILE> many;
            const std::integral_constant<int, 1> one;
            int i = 0;
            for (; i + TILE <= rows; i += TILE) {
                int j = 0;
                for (; j + TILE <= columns; j += TILE) tile(many, many, i, j);
                for (; j < columns; ++j) tile(many, one, i, j);
            }
            for (; i < rows; ++i) {
                int j = 0;
                for (; j + TILE <= columns; j += TILE) tile(one, many, i, j);
                for (; j < columns; ++j) tile(one, one, i, j);
            }
        }
}

// -- sums of the past, masks ------------------------------------------------------------------------------------------

// n = {outer, count, inner}: y = sums over the second axis up to each place; flag: from each place on.
template <class T> void run_RUNNING_SUM(const Call<T>& c) {
    const int count = c.n[1];
    const int64_t row = int64_t(c.n[2]) * c.chunk.stride;
    for (int64_t o = 0; o < c.n[0]; ++o) {
        const T* x = c.p[0] + o * count * row;
        T* y = c.p[1] + o * count * row;
        for (int m = 0; m < count; ++m) {
            const int64_t at = (c.flag ? count - 1 - m : m) * row, before = c.flag ? at + row : at - row;
            if (!m) {
                std::memcpy(y + at, x + at, sizeof(T) * row);
                continue;
            }
#pragma omp simd
            for (int64_t i = 0; i < row; ++i) y[at + i] = y[before + i] + x[at + i];
        }
    }
}

// n = {rows}: a where the mask is not zero, else b; number[0] instead of rows that are not given. flag: the mask has
// rows of lanes; else it is a number for each row.
template <class T> void run_SELECT(const Call<T>& c) {
    const int lanes = c.chunk.lanes;
    const T other = T(c.number[0]);
    for (int64_t r = 0; r < c.n[0]; ++r) {
        if (c.flag) {
            const int64_t at = r * c.chunk.stride;
            const T *mask = c.p[0] + at, *a = c.p[1] ? c.p[1] + at : nullptr, *b = c.p[2] ? c.p[2] + at : nullptr;
            T* y = c.p[3] + at;
            if (a && b) {
                ESPER_EACH_LANE y[lane] = mask[lane] != T(0) ? a[lane] : b[lane];
            } else if (a) {
                ESPER_EACH_LANE y[lane] = mask[lane] != T(0) ? a[lane] : other;
            } else {
                ESPER_EACH_LANE y[lane] = mask[lane] != T(0) ? other : b[lane];
            }
            continue;
        }
        const T* from = c.p[0][r] != T(0) ? c.p[1] : c.p[2];
        T* y = c.p[3] + r * c.chunk.stride;
        if (from) {
            std::memcpy(y, from + r * c.chunk.stride, sizeof(T) * c.chunk.stride);
        } else {
            ESPER_EACH_LANE y[lane] = other;
        }
    }
}

enum Comparison { EQUAL, UNEQUAL, LESS, AT_MOST, GREATER, AT_LEAST };

// n = {rows}: 1 where the comparison holds, else 0. b (null: number[0])
template <class T> void run_COMPARE(const Call<T>& c) {
    int rows = c.n[0], lanes = c.chunk.lanes, stride = c.chunk.stride;
    merge_rows(rows, lanes, stride);
    const auto all = [&](auto holds) {
        for (int64_t r = 0; r < rows; ++r) {
            const T* a = c.p[0] + r * stride;
            T* y = c.p[2] + r * stride;
            if (const T* b = c.p[1] ? c.p[1] + r * stride : nullptr) {
                ESPER_EACH_LANE y[lane] = holds(a[lane], b[lane]) ? T(1) : T(0);
            } else {
                const T number = T(c.number[0]);
                ESPER_EACH_LANE y[lane] = holds(a[lane], number) ? T(1) : T(0);
            }
        }
    };
    switch (c.flag) {
        case EQUAL: return all([](T a, T b) { return a == b; });
        case UNEQUAL: return all([](T a, T b) { return a != b; });
        case LESS: return all([](T a, T b) { return a < b; });
        case AT_MOST: return all([](T a, T b) { return a <= b; });
        case GREATER: return all([](T a, T b) { return a > b; });
        default: return all([](T a, T b) { return a >= b; });
    }
}

}  // namespace esper
