// Sequences, on rows of lanes [T][D]: embeddings, attention, products of two activations, sums of the past, dropout.
//
// A product of two activations multiplies row by row: numbers of an example meet only numbers of the same example.
// Tiles of 4 x 4 rows (4 x 2 where there are few registers) stay in registers, so that each row that is read serves
// several products.

#pragma once

#include "lanes.h"

#include <algorithm>
#include <vector>

// X(name, operands): see program.cpp.
#define ESPER_SEQUENCES(X)                                                                                             \
    X(EMBED, "xxx") X(EMBED_WEIGHT_GRAD, "xxx") X(ATTEND, "xxxxlxxx") X(ATTEND_BACKWARD, "xxxxxxxlxxxx")               \
    X(PRODUCT, "xxx") X(RUNNING_SUM, "xx") X(SELECT, "xxxx") X(COMPARE, "xxx") X(DROP, "xlx")

namespace esper {

constexpr int TILE = 4, ACROSS = REGISTERS / 8;  // rows of a tile

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
                for (int d = 0; d < std::min(FEW, each - first); ++d) y[d * stride] = from[d] + wrong;
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

// Reads a mask for N examples, four elements of each at a time. A mask is in the order [example][element]: numbers of 16
// bits, four from each word.
template <int N> struct Reader {
    static constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
    uint64_t next[N], held[N], low[N];  // four elements are the end of the word that is held and the beginning of the next
    int64_t least;

    static uint64_t mixed(uint64_t z) {  // SplitMix64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }

    // `each`: elements of an example. `limit`: the smallest number of 16 bits, with sign, whose element is kept. `first`:
    // element of the first example at which the reader begins, counted from the beginning of the mask.
    void begin(int64_t key, int64_t each, double limit, int64_t first) {
        least = int64_t(limit) * (int64_t(1) << 48);
#pragma omp simd
        for (int l = 0; l < N; ++l) {
            const uint64_t element = first + l * each;
            low[l] = (element & 3) * 16;
            next[l] = key + ((element >> 2) + 1) * GOLDEN;
            held[l] = mixed(next[l]);
        }
    }

    // The numbers of four elements, the first ones in the low bits.
    void four(uint64_t* bits) {
#pragma omp simd
        for (int l = 0; l < N; ++l) {
            next[l] += GOLDEN;
            const uint64_t word = mixed(next[l]);
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
    constexpr int N = LANES, READERS = 4;
    const int each = c.n[0], inner = c.n[1], lanes = c.chunk.lanes, stride = c.chunk.stride;
    const T factor = T(c.number[1]);
    Reader<N> readers[READERS];
    uint64_t bits[N];
    T kept[N];
    for (int first = 0; first < lanes; first += N * READERS) {
        const int last = std::min(first + N * READERS, stride);
        for (int at = first; at < last; at += N)
            readers[(at - first) / N].begin(*c.template as<int64_t>(1), each, c.number[0],
                                            int64_t(c.chunk.before + at) * each);
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

// -- products of two activations --------------------------------------------------------------------------------------

// sum[i][j] += inner product of rows of a, `a_row` apart, and of b. Their numbers are `a_step` and `b_step` apart.
template <class T, int Q, int R>
inline void inner_products(int inner, const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_row,
                           int64_t b_step, wide<T> (&sum)[Q][R]) {
    for (int k = 0; k < inner; ++k, a += a_step, b += b_step) {
        wide<T> first[Q];
        for (int i = 0; i < Q; ++i) first[i] = load(a + i * a_row);
        for (int j = 0; j < R; ++j) {
            const wide<T> second = load(b + j * b_row);
            for (int i = 0; i < Q; ++i) sum[i][j] += first[i] * second;
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
constexpr int BLOCK = 16, KEYS_FORWARD = 16, KEYS_BACKWARD = 8, SECOND_LEVEL = 64;

// One head and one vector of lanes at a time, in tiles of Q queries; their scores are [key][query] in memory, the keys of
// a block. Where rows of lanes are longer than a vector, rows [count][size] of the head are copied next to each other,
// because every second line of memory would use half of the cache.
template <class T> struct Attention {
    const Call<T>& c;
    const T* mask;        // added to the scores [heads][queries][keys]; null: nothing
    const int64_t* draw;  // keys of the masks of dropout, one for each part of PART queries; null: no dropout
    T* scratch;
    int heads = c.n[0], queries = c.n[1], keys = c.n[2], size = c.n[3];  // `size`: numbers of a query, key or value
    int stride = c.chunk.stride, head = 0, at = 0;  // at: the first lane
    bool causal = (c.flag & 1) != 0;
    T scale = T(c.number[0]), kept = draw ? T(c.number[2]) : T(1);  // kept: factor of weights that are kept
    T* free = scratch;
    const T *q = nullptr, *k = nullptr, *v = nullptr, *g = nullptr;
    T *y = nullptr, *delta = nullptr, *grad_q = nullptr, *grad_k = nullptr, *grad_v = nullptr;

    static constexpr int PART = 32, W = width<T>();
    using Scores = wide<T> (*)[TILE];

    // The last key that a query sees, and one more.
    int seen(int query) const { return causal ? std::min(keys, query + 1) : keys; }

    int64_t row(int which) const { return int64_t(which) * size * W; }

    template <class U> U* of_head(U* x, int count) const { return x + int64_t(head) * count * size * stride + at; }

    const T* packed(const T* x, int count, T factor = T(1)) {
        x = of_head(x, count);
        if (stride == W && factor == T(1)) return x;
        T* to = free;
        free += row(count);
        copy(x, stride, to, W, count, factor);
        return to;
    }

    void copy(const T* from, int from_step, T* to, int to_step, int count, T factor) const {
        for (int left = count * size; left > 0; --left, from += from_step, to += to_step)
            store<T>(to, load(from) * factor);
    }

    // Where sums begin at zero.
    T* cleared(T* x, int count) {
        T* to = stride == W ? of_head(x, count) : free;
        if (stride != W) free += row(count);
        std::memset(to, 0, sizeof(T) * row(count));
        return to;
    }

    void unpack(const T* from, T* x, int count, T factor = T(1)) const {
        if (stride == W && factor == T(1)) return;
        copy(from, W, of_head(x, count), stride, count, factor);
    }

    // p[j][i] = inner product of a[i] and b[j], vectors of `size` rows.
    template <int Q> void products(const T* a, const T* b, int count, Scores p) const {
        in_pieces<ACROSS, 1>(count, [&](auto some, int first) {
            constexpr int K = decltype(some)::value;
            wide<T> sum[Q][K] = {};
            inner_products(size, a, row(1), W, b + row(first), row(1), W, sum);
            for (int j = 0; j < K; ++j)
                for (int i = 0; i < Q; ++i) p[first + j][i] = sum[i][j];
        });
    }

    // Products with the keys, with the mask added and later keys hidden.
    template <int Q> void scores(int query, int key, int count, Scores p) const {
        products<Q>(q + row(query), k + row(key), count, p);
        const int64_t of_head = c.flag & 2 ? int64_t(head) * queries * keys : 0;
        for (int j = 0; mask && j < count; ++j)
            for (int i = 0; i < Q; ++i) p[j][i] += mask[of_head + int64_t(query + i) * keys + key + j];
        for (int j = std::max(0, query + 1 - key); causal && j < count; ++j)
            for (int i = 0; i < Q; ++i)
                if (key + j > query + i) p[j][i] = wide<T>{} - std::numeric_limits<T>::infinity();
    }

    // to[i] = factor[i] to[i] + sum_j p[j][i] x[j]
    template <int Q> void mix(Scores p, int count, const T* x, const wide<T>* factors, T* to) const {
        in_pieces<ACROSS, 1>(size, [&](auto some, int first) {
            constexpr int D = decltype(some)::value;
            const T* from = x + first * W;
            wide<T> sum[Q][D];
            for (int i = 0; i < Q; ++i)
                for (int d = 0; d < D; ++d) {
                    sum[i][d] = load(to + i * row(1) + (first + d) * W);
                    if (factors) sum[i][d] *= factors[i];
                }
            for (int j = 0; j < count; ++j, from += row(1)) {
                wide<T> value[D];
                for (int d = 0; d < D; ++d) value[d] = load(from + d * W);
                for (int i = 0; i < Q; ++i) {
                    const wide<T> weight = p[j][i];
                    for (int d = 0; d < D; ++d) sum[i][d] += weight * value[d];
                }
            }
            for (int i = 0; i < Q; ++i)
                for (int d = 0; d < D; ++d) store<T>(to + i * row(1) + (first + d) * W, sum[i][d]);
        });
    }

    // to[j] += sum_i p[j][i] x[i]
    template <int Q> void scatter(Scores p, int count, const T* x, T* to) const {
        in_pieces<ACROSS, 1>(count, [&](auto some, int first) {
            constexpr int K = decltype(some)::value;
            wide<T> weight[K][Q];
            for (int j = 0; j < K; ++j)
                for (int i = 0; i < Q; ++i) weight[j][i] = p[first + j][i];
            const T* from = x;
            T* sums = to + row(first);
            for (int d = 0; d < size; ++d, from += W, sums += W) {
                wide<T> value[Q];
                for (int i = 0; i < Q; ++i) value[i] = load(from + i * row(1));
                for (int j = 0; j < K; ++j) {
                    wide<T> sum = load(sums + j * row(1));
                    for (int i = 0; i < Q; ++i) sum += weight[j][i] * value[i];
                    store<T>(sums + j * row(1), sum);
                }
            }
        });
    }

    // Multiplies weights by the mask of dropout times `one`. A mask is [example][head][query of the part][key up to the
    // end of the part].
    template <int Q> void drop(int query, int key, int count, T one, Scores p) const {
        const int first = query / PART * PART, end = std::min(first + PART, queries);
        const int64_t each = int64_t(heads) * (end - first) * end;
        Reader<W> reader;
        uint64_t bits[W];
        T mask_of_key[W];
        for (int i = 0; i < Q; ++i) {
            const int64_t of_query = (int64_t(head) * (end - first) + query + i - first) * end + key;
            reader.begin(draw[query / PART], each, c.number[1], (c.chunk.before + at) * each + of_query);
            for (int j = 0; j < count; j += 4) {
                reader.four(bits);
                for (int n = 0; n < std::min(4, count - j); ++n) {
                    reader.kept(bits, n, one, mask_of_key);
                    p[j + n][i] *= load(mask_of_key);
                }
            }
        }
    }

    // Q queries and the keys of a block. `top` and `sum` are the largest score and the sum of exp(score - top) so far.
    template <int Q> void forward(int query, int begin, int end, wide<T>* top, wide<T>* sum) const {
        wide<T> p[KEYS_FORWARD][TILE], base[Q], factors[Q], more[Q];
        const int count = std::min(end, seen(query + Q - 1)) - begin;
        scores<Q>(query, begin, count, p);
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
        if (draw) drop<Q>(query, begin, count, T(1), p);
        mix<Q>(p, count, v + row(begin), factors, y + row(query));
    }

    // `stats` (null: not kept) [2][heads][queries]: the largest score, and 1 / the sum of exp(score - largest).
    void run(T* outputs, T* stats) {
        q = packed(c.p[0], queries, scale), k = packed(c.p[1], keys), v = packed(c.p[2], keys);
        y = cleared(outputs, queries);
        for (int first = 0; first < queries; first += BLOCK) {
            const int last = std::min(first + BLOCK, queries);
            wide<T> top[BLOCK], sum[BLOCK] = {};
            for (auto& x : top) x = wide<T>{} - std::numeric_limits<T>::infinity();
            for (int begin = 0; begin < seen(last - 1); begin += KEYS_FORWARD) {
                const int end = std::min(begin + KEYS_FORWARD, keys);
                in_pieces<TILE, 1>(last - first, [&](auto some, int t) {
                    constexpr int Q = decltype(some)::value;
                    if (begin < seen(first + t + Q - 1)) forward<Q>(first + t, begin, end, top + t, sum + t);
                });
            }
            for (int t = first; t < last; ++t) {
                const wide<T> inverse = T(1) / sum[t - first], scaled = inverse * kept;
                for (T *out = y + row(t), *to = out + row(1); out < to; out += W) store<T>(out, load(out) * scaled);
                if (!stats) continue;
                T* to = stats + (int64_t(head) * queries + t) * stride + at;
                store_lanes<T>(to, top[t - first], c.chunk.lanes - at);
                store_lanes<T>(to + int64_t(heads) * queries * stride, inverse, c.chunk.lanes - at);
            }
        }
        unpack(y, outputs, queries);
    }

    // Q queries and the keys of a block.
    template <int Q> void backward(int query, int begin, int end, const T* stats) const {
        wide<T> p[KEYS_BACKWARD][TILE], of_score[KEYS_BACKWARD][TILE], top[Q], inverse[Q], inner[Q];
        const int count = std::min(end, seen(query + Q - 1)) - begin;
        scores<Q>(query, begin, count, p);
        products<Q>(g + row(query), v + row(begin), count, of_score);
        if (draw) drop<Q>(query, begin, count, kept, of_score);
        for (int i = 0; i < Q; ++i) {
            const T* own = stats + (int64_t(head) * queries + query + i) * stride + at;
            top[i] = load(own), inverse[i] = load(own + int64_t(heads) * queries * stride);
            inner[i] = load(delta + (query + i) * W);
        }
        if (mask)  // beyond the lanes, where `stats` is zero, a mask could be larger than the largest score
            for (int j = 0; j < count; ++j)
                for (int i = 0; i < Q; ++i) p[j][i] = p[j][i] > top[i] ? top[i] : p[j][i];
        for (int j = 0; j < count; ++j)
            for (int i = 0; i < Q; ++i) {
                p[j][i] = exp_below(p[j][i] - top[i]) * inverse[i];
                of_score[j][i] = p[j][i] * (of_score[j][i] - inner[i]);
            }
        mix<Q>(of_score, count, k + row(begin), nullptr, grad_q + row(query));
        scatter<Q>(of_score, count, q + row(query), grad_k + row(begin));
        if (draw) drop<Q>(query, begin, count, kept, p);
        scatter<Q>(p, count, g + row(query), grad_v + row(begin));
    }

    void run_backward(const T* outputs, const T* grad, const T* stats, T* const* grads) {
        delta = free, free += int64_t(queries) * W;  // of each query: inner product of the output and its gradient
        q = packed(c.p[0], queries, scale), k = packed(c.p[1], keys), v = packed(c.p[2], keys);
        g = packed(grad, queries);
        grad_q = cleared(grads[0], queries), grad_k = cleared(grads[1], keys), grad_v = cleared(grads[2], keys);
        const T* out = of_head(outputs, queries);
        for (int t = 0; t < queries; ++t) {
            wide<T> sum = {};
            for (const T* x = g + row(t); x < g + row(t + 1); x += W, out += stride) sum += load(out) * load(x);
            store<T>(delta + t * W, sum);
        }
        for (int first = 0; first < queries; first += SECOND_LEVEL) {
            const int last = std::min(first + SECOND_LEVEL, queries);
            for (int begin = 0; begin < seen(last - 1); begin += KEYS_BACKWARD) {
                const int end = std::min(begin + KEYS_BACKWARD, keys), from = causal ? std::max(first, begin) : first;
                in_pieces<TILE, 1>(last - from, [&](auto some, int t) {
                    backward<decltype(some)::value>(from + t, begin, end, stats);
                });
            }
        }
        unpack(grad_q, grads[0], queries, scale), unpack(grad_k, grads[1], keys), unpack(grad_v, grads[2], keys);
    }

    template <class F> void each(F f) {
        for (head = 0; head < heads; ++head)
            for (at = 0; at < stride; at += W, free = scratch) f();
    }
};

// n = {heads, queries, keys, numbers of each}, flag = {1: causal, 2: a mask for each head}, number = {scale, limit and
// factor of dropout}
template <class T> void run_ATTEND(const Call<T>& c) {
    Attention<T> all{c, c.p[3], c.template as<int64_t>(4), c.p[7]};
    all.each([&] { all.run(c.p[5], c.p[6]); });
}

template <class T> void run_ATTEND_BACKWARD(const Call<T>& c) {
    Attention<T> all{c, c.p[6], c.template as<int64_t>(7), c.p[11]};
    all.each([&] { all.run_backward(c.p[3], c.p[4], c.p[5], c.p + 8); });
}

// n = {matrices, rows, columns, inner size}: y = a b for each of them. flag = {1: a is transposed, 2: b is transposed}
template <class T> void run_PRODUCT(const Call<T>& c) {
    const int rows = c.n[1], columns = c.n[2], inner = c.n[3], stride = c.chunk.stride;
    const int64_t s = stride, a_row = c.flag & 1 ? s : inner * s, a_step = c.flag & 1 ? rows * s : s;
    const int64_t b_step = c.flag & 2 ? s : columns * s, b_column = c.flag & 2 ? inner * s : s;
    for (int at = 0; at < stride; at += width<T>())
        for (int m = 0; m < c.n[0]; ++m) {
            const T* a = c.p[0] + int64_t(m) * rows * inner * s + at;
            const T* b = c.p[1] + int64_t(m) * inner * columns * s + at;
            T* y = c.p[2] + int64_t(m) * rows * columns * s + at;
            in_pieces<TILE, 1>(rows, [&](auto q, int i) {
                in_pieces<ACROSS, 1>(columns, [&](auto r, int j) {
                    constexpr int Q = decltype(q)::value, R = decltype(r)::value;
                    wide<T> sum[Q][R] = {};
                    inner_products(inner, a + i * a_row, a_row, a_step, b + j * b_column, b_column, b_step, sum);
                    for (int u = 0; u < Q; ++u)
                        for (int v = 0; v < R; ++v) store<T>(y + ((i + u) * columns + j + v) * s, sum[u][v]);
                });
            });
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
            const int64_t at = (c.flag ? count - 1 - m : m) * row;
            const T* before = c.flag ? y + at + row : y + at - row;
#pragma omp simd
            for (int64_t i = 0; i < row; ++i) y[at + i] = m ? before[i] + x[at + i] : x[at + i];
        }
    }
}

// n = {rows}: a where the mask is not zero, else b; number[0] instead of rows that are not given. flag: the mask has
// rows of lanes; else it is a number for each row.
template <class T> void run_SELECT(const Call<T>& c) {
    const int lanes = c.chunk.lanes;
    const std::vector<T> number(lanes, T(c.number[0]));
    for (int64_t r = 0; r < c.n[0]; ++r) {
        const int64_t at = r * c.chunk.stride;
        const T *mask = c.p[0] + (c.flag ? at : r), *a = c.p[1] ? c.p[1] + at : number.data();
        const T *b = c.p[2] ? c.p[2] + at : number.data(), *one = *mask != T(0) ? a : b;
        T* y = c.p[3] + at;
        if (c.flag) {
            ESPER_EACH_LANE y[lane] = mask[lane] != T(0) ? a[lane] : b[lane];
        } else {
            ESPER_EACH_LANE y[lane] = one[lane];
        }
    }
}

// n = {rows}: 1 where the comparison (flag) holds, else 0. b (null: number[0])
template <class T> void run_COMPARE(const Call<T>& c) {
    const int lanes = c.chunk.lanes, stride = c.chunk.stride;
    const std::vector<T> number(lanes, T(c.number[0]));
    const auto all = [&](auto holds) {
        for (int64_t r = 0; r < c.n[0]; ++r) {
            const T *a = c.p[0] + r * stride, *b = c.p[1] ? c.p[1] + r * stride : number.data();
            T* y = c.p[2] + r * stride;
            ESPER_EACH_LANE y[lane] = holds(a[lane], b[lane]) ? T(1) : T(0);
        }
    };
    switch (c.flag) {
        case 0: return all([](T a, T b) { return a == b; });
        case 1: return all([](T a, T b) { return a != b; });
        case 2: return all([](T a, T b) { return a < b; });
        case 3: return all([](T a, T b) { return a <= b; });
        case 4: return all([](T a, T b) { return a > b; });
        default: return all([](T a, T b) { return a >= b; });
    }
}

}  // namespace esper
