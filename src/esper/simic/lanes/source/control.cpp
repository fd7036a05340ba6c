// A recorded function of hosts as a list of instructions, and the loop that carries them out for all hosts.
//
// Who reads them is here; who writes them is program.py, which knows the same names in the same order. 64 hosts are
// taken through the whole list before the next 64, so that what is in between stays in the cache:
//
//     register   one number of every host of a block, side by side: lane = host
//     arena      working memory; a register is a place in it, in bytes
//     words      operation, count, then for each of `count` elements the registers it writes and reads
//
// Lanes never meet: what a host gets depends on no other host. Lanes beyond the last host repeat it.

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "arithmetic.h"

#define ESPER_KINDS(X, NAME, ...) X(NAME, F, float, __VA_ARGS__) X(NAME, D, double, __VA_ARGS__)
#define ESPER_NUMBERS(X, NAME, ...) ESPER_KINDS(X, NAME, __VA_ARGS__) X(NAME, I, int64_t, __VA_ARGS__)
#define ESPER_ALL(X, NAME, ...) ESPER_NUMBERS(X, NAME, __VA_ARGS__) X(NAME, B, uint8_t, __VA_ARGS__)

// Of two numbers a and b of one kind, of the same kind.
#define ESPER_BINARY(X)                                                                                              \
    ESPER_NUMBERS(X, ADD, a + b)                                                                                     \
    ESPER_NUMBERS(X, SUB, a - b)                                                                                     \
    ESPER_NUMBERS(X, MUL, a* b)                                                                                      \
    ESPER_NUMBERS(X, MIN, least(a, b))                                                                               \
    ESPER_NUMBERS(X, MAX, most(a, b))                                                                                \
    ESPER_KINDS(X, FMIN, least_number(a, b))                                                                         \
    ESPER_KINDS(X, FMAX, most_number(a, b))                                                                          \
    ESPER_KINDS(X, DIV, a / b)                                                                                       \
    ESPER_KINDS(X, POW, power_of(a, b))                                                                              \
    X(REM, I, int64_t, remainder_of(a, b))                                                                           \
    X(FLOOR_DIV, I, int64_t, floor_of_quotient(a, b))                                                                \
    X(AND, B, uint8_t, a& b)                                                                                         \
    X(OR, B, uint8_t, a | b)                                                                                         \
    X(XOR, B, uint8_t, a ^ b)
// Of two numbers, true or false.
#define ESPER_COMPARE(X)                                                                                             \
    ESPER_ALL(X, EQ, a == b) ESPER_ALL(X, NE, a != b) ESPER_ALL(X, LT, a < b) ESPER_ALL(X, LE, a <= b)
// Of one number a.
#define ESPER_UNARY(X)                                                                                               \
    ESPER_NUMBERS(X, NEG, -a)                                                                                        \
    ESPER_NUMBERS(X, ABS, size_of(a)    )                                                                            \
    ESPER_NUMBERS(X, SIGN, sign_of(a))                                                                               \
    ESPER_KINDS(X, SQRT, std::sqrt(a))                                                                               \
    ESPER_KINDS(X, EXP, exp_of(a))                                                                                   \
    ESPER_KINDS(X, LOG, log_of(a))                                                                                   \
    ESPER_KINDS(X, LOG1P, log1p_of(a))                                                                               \
    ESPER_KINDS(X, TANH, tanh_of(a))                                                                                 \
    ESPER_KINDS(X, SIGMOID, sigmoid_of(a))                                                                           \
    ESPER_KINDS(X, COS, std::cos(a))                                                                                 \
    ESPER_KINDS(X, ROUND, std::nearbyint(a))                                                                         \
    ESPER_KINDS(X, FLOOR, std::floor(a))                                                                             \
    X(NOT, B, uint8_t, a ^ 1)
// Of a number of one kind, the same of another.
#define ESPER_CONVERSIONS(X)                                                                                         \
    X(F, float, D, double) X(F, float, I, int64_t) X(F, float, B, uint8_t)                                           \
    X(D, double, F, float) X(D, double, I, int64_t) X(D, double, B, uint8_t)                                         \
    X(I, int64_t, F, float) X(I, int64_t, D, double) X(I, int64_t, B, uint8_t)                                       \
    X(B, uint8_t, F, float) X(B, uint8_t, D, double) X(B, uint8_t, I, int64_t)
// Where a mask is, one number, else another; the one of several that an index names; memory of the caller.
#define ESPER_MEMORY(X)                                                                                              \
    ESPER_ALL(X, SELECT, ) ESPER_ALL(X, GATHER, ) ESPER_ALL(X, LOOK_UP, )                                           \
    ESPER_ALL(X, LOAD, ) ESPER_ALL(X, SPREAD, ) ESPER_ALL(X, STORE, )
// Layers: W x + b, and LayerNorm.
#define ESPER_LAYERS(X) ESPER_KINDS(X, LINEAR, ) ESPER_KINDS(X, AFFINE, ) ESPER_KINDS(X, NORM, )

namespace esper {

#define NAMED(name, kind, ...) name##_##kind,
#define CONVERSION(to_kind, to, from_kind, from) TO_##to_kind##_##from_kind,
enum Operation : int32_t {
    ESPER_BINARY(NAMED) ESPER_COMPARE(NAMED) ESPER_UNARY(NAMED) ESPER_CONVERSIONS(CONVERSION) ESPER_MEMORY(NAMED)
        ESPER_LAYERS(NAMED)
};
#undef NAMED
#undef CONVERSION

constexpr int LANES = 64, STEP = 16;  // lanes of a register; those in use are filled up to a multiple of 16
constexpr int FEW = 8;                // choices that are compared one after another

struct Block {
    char* arena;
    const int64_t* memory;  // where the tensors of the caller begin
    int64_t first;          // host of lane 0
    int hosts, lanes;

    template <class T> T* at(int32_t place) const { return reinterpret_cast<T*>(arena + place); }
};

// For `count` elements one register [lanes] from one, two or three others; returns what follows in the list.
template <class To, class From, class F> const int32_t* each(const Block& b, const int32_t* w, int count, F f) {
    for (; count > 0; --count, w += 2) {
        To* to = b.at<To>(w[0]);
        const From* from = b.at<From>(w[1]);
        for (int l = 0; l < b.lanes; l += STEP) {
#pragma omp simd
            for (int i = 0; i < STEP; ++i) to[l + i] = f(from[l + i]);
        }
    }
    return w;
}

template <class To, class From, class F> const int32_t* each_two(const Block& b, const int32_t* w, int count, F f) {
    for (; count > 0; --count, w += 3) {
        To* to = b.at<To>(w[0]);
        const From *x = b.at<From>(w[1]), *y = b.at<From>(w[2]);
        for (int l = 0; l < b.lanes; l += STEP) {
#pragma omp simd
            for (int i = 0; i < STEP; ++i) to[l + i] = f(x[l + i], y[l + i]);
        }
    }
    return w;
}

template <int bytes> struct Whole;
template <> struct Whole<1> { using type = uint8_t; };
template <> struct Whole<4> { using type = uint32_t; };
template <> struct Whole<8> { using type = uint64_t; };

// By bits, which become vectors more easily than a choice of numbers by a mask of bytes.
template <class T> const int32_t* select(const Block& b, const int32_t* w, int count) {
    using U = typename Whole<sizeof(T)>::type;
    for (; count > 0; --count, w += 4) {
        U* to = b.at<U>(w[0]);
        const uint8_t* mask = b.at<uint8_t>(w[1]);
        const U *yes = b.at<U>(w[2]), *no = b.at<U>(w[3]);
        for (int l = 0; l < b.lanes; l += STEP) {
#pragma omp simd
            for (int i = 0; i < STEP; ++i) {
                const U all = U(0) - U(mask[l + i]);
                to[l + i] = (yes[l + i] & all) | (no[l + i] & ~all);
            }
        }
    }
    return w;
}

inline bool is_outside(const Block& b, const int64_t* index, int choices) {
    int64_t outside = 0;
#pragma omp simd reduction(| : outside)
    for (int l = 0; l < b.lanes; ++l) outside |= int64_t(uint64_t(index[l]) >= uint64_t(choices));
    return outside != 0;
}

// Words: choices, then for each element: register, index, and the registers to choose from. Null for an index outside.
template <class T> const int32_t* gather(const Block& b, const int32_t* w, int count) {
    using U = typename Whole<sizeof(T)>::type;
    const int choices = *w++;
    for (; count > 0; --count, w += 2 + choices) {
        U* to = b.at<U>(w[0]);
        const int64_t* index = b.at<int64_t>(w[1]);
        if (is_outside(b, index, choices)) return nullptr;
        if (choices > FEW) {
            for (int l = 0; l < b.lanes; ++l) to[l] = b.at<U>(w[2 + index[l]])[l];
            continue;
        }
        alignas(64) U place[LANES];
        const U* choice = b.at<U>(w[2]);
        for (int l = 0; l < b.lanes; ++l) place[l] = U(index[l]), to[l] = choice[l];
        for (int k = 1; k < choices; ++k) {
            choice = b.at<U>(w[2 + k]);
            for (int l = 0; l < b.lanes; ++l) {
                const U all = U(0) - U(place[l] == U(k));
                to[l] = (choice[l] & all) | (to[l] & ~all);
            }
        }
    }
    return w;
}

// As `gather`, where the choices are the same in all lanes: a table, which lies in one register of the processor or two.
template <class T> const int32_t* look_up(const Block& b, const int32_t* w, int count) {
    using U = typename Whole<sizeof(T)>::type;
    typedef U Table __attribute__((vector_size(64)));
    constexpr int WIDTH = 64 / sizeof(U);
    const int choices = *w++;
    for (; count > 0; --count, w += 2 + choices) {
        U* to = b.at<U>(w[0]);
        const int64_t* index = b.at<int64_t>(w[1]);
        if (is_outside(b, index, choices)) return nullptr;
        if (sizeof(U) == 1 && choices <= 64) {  // truth values: the bits of a word
            uint64_t bits = 0;
            for (int k = 0; k < choices; ++k) bits |= uint64_t(*b.at<uint8_t>(w[2 + k])) << k;
            for (int l = 0; l < b.lanes; ++l) to[l] = U((bits >> index[l]) & 1);
        } else if (sizeof(U) > 1 && choices <= 2 * WIDTH) {
            Table low = {}, high = {};
            for (int k = 0; k < choices; ++k) (k < WIDTH ? low : high)[k % WIDTH] = *b.at<U>(w[2 + k]);
            for (int l = 0; l < b.lanes; l += WIDTH) {
                Table place;
                for (int i = 0; i < WIDTH; ++i) place[i] = U(index[l + i]);
#ifdef __clang__
                for (int i = 0; i < WIDTH; ++i) to[l + i] = place[i] < WIDTH ? low[place[i]] : high[place[i] - WIDTH];
#else
                *reinterpret_cast<Table*>(to + l) = __builtin_shuffle(low, high, place);
#endif
            }
        } else {
            for (int l = 0; l < b.lanes; ++l) to[l] = *b.at<U>(w[2 + index[l]]);
        }
    }
    return w;
}

// 16 x 16 numbers from rows to columns.
#ifdef __AVX512F__
// The four numbers from `column` on of rows k, k + 4, k + 8 and k + 12.
inline __m512 quarters(const float* const* from, int column, int k) {
    __m512 all = _mm512_castps128_ps512(_mm_loadu_ps(from[k] + column));
    all = _mm512_insertf32x4(all, _mm_loadu_ps(from[k + 4] + column), 1);
    all = _mm512_insertf32x4(all, _mm_loadu_ps(from[k + 8] + column), 2);
    return _mm512_insertf32x4(all, _mm_loadu_ps(from[k + 12] + column), 3);
}

// Four columns at a time, whose quarters of four rows are turned side by side.
inline void transpose(const float* const* from, float* const* to) {
    for (int column = 0; column < STEP; column += 4) {
        const __m512 a = quarters(from, column, 0), b = quarters(from, column, 1);
        const __m512 c = quarters(from, column, 2), d = quarters(from, column, 3);
        const __m512 ab = _mm512_unpacklo_ps(a, b), cd = _mm512_unpacklo_ps(c, d);
        const __m512 ab_high = _mm512_unpackhi_ps(a, b), cd_high = _mm512_unpackhi_ps(c, d);
        _mm512_storeu_ps(to[column], _mm512_shuffle_ps(ab, cd, 0x44));
        _mm512_storeu_ps(to[column + 1], _mm512_shuffle_ps(ab, cd, 0xee));
        _mm512_storeu_ps(to[column + 2], _mm512_shuffle_ps(ab_high, cd_high, 0x44));
        _mm512_storeu_ps(to[column + 3], _mm512_shuffle_ps(ab_high, cd_high, 0xee));
    }
}
#else
inline void transpose(const float* const* from, float* const* to) {
    for (int i = 0; i < STEP; ++i)
        for (int j = 0; j < STEP; ++j) to[j][i] = from[i][j];
}
#endif

// Whether 16 elements from this one on lie in a row. `w` are pairs of a register and the place of its number.
template <class T> inline bool are_beside(const int32_t* w, int e, int count) {
    if (sizeof(T) != sizeof(float) || e + STEP > count) return false;
    for (int i = 1; i < STEP; ++i)
        if (w[2 * (e + i) + 1] != w[2 * e + 1] + i) return false;
    return true;
}

// Words: tensor, numbers from one host to the next, then for each element: register, number of host 0.
template <class T> const int32_t* load(const Block& b, const int32_t* w, int count) {
    const int64_t stride = w[1];
    const T* from = reinterpret_cast<const T*>(b.memory[w[0]]) + b.first * stride;
    w += 2;
    for (int e = 0; e < count; ++e) {
        T* to = b.at<T>(w[2 * e]);
        const T* row = from + w[2 * e + 1];
        if (stride != 1 && are_beside<T>(w, e, count)) {
            for (int l = 0; l < b.lanes; l += STEP) {
                const T* rows[STEP];
                T* columns[STEP];
                for (int i = 0; i < STEP; ++i) {
                    rows[i] = row + stride * (l + i < b.hosts ? l + i : b.hosts - 1);
                    columns[i] = b.at<T>(w[2 * (e + i)]) + l;
                }
                transpose(reinterpret_cast<const float* const*>(rows), reinterpret_cast<float* const*>(columns));
            }
            e += STEP - 1;
            continue;
        }
        if (stride == 1) {
            std::memcpy(to, row, b.hosts * sizeof(T));
        } else {
            for (int l = 0; l < b.hosts; ++l) to[l] = row[stride * l];
        }
        for (int l = b.hosts; l < b.lanes; ++l) to[l] = to[b.hosts - 1];
    }
    return w + 2 * count;
}

// Words as of `load`: the same number in all lanes.
template <class T> const int32_t* spread(const Block& b, const int32_t* w, int count) {
    const T* from = reinterpret_cast<const T*>(b.memory[w[0]]);
    for (w += 2; count > 0; --count, w += 2) {
        T* to = b.at<T>(w[0]);
        const T value = from[w[1]];
        for (int l = 0; l < b.lanes; ++l) to[l] = value;
    }
    return w;
}

template <class T> const int32_t* keep(const Block& b, const int32_t* w, int count) {
    const int64_t stride = w[1];
    T* to = reinterpret_cast<T*>(b.memory[w[0]]) + b.first * stride;
    w += 2;
    for (int e = 0; e < count; ++e) {
        const T* from = b.at<T>(w[2 * e]);
        T* row = to + w[2 * e + 1];
        if (stride != 1 && b.hosts % STEP == 0 && are_beside<T>(w, e, count)) {
            for (int l = 0; l < b.hosts; l += STEP) {
                const T* columns[STEP];
                T* rows[STEP];
                for (int i = 0; i < STEP; ++i) {
                    rows[i] = row + stride * (l + i);
                    columns[i] = b.at<T>(w[2 * (e + i)]) + l;
                }
                transpose(reinterpret_cast<const float* const*>(columns), reinterpret_cast<float* const*>(rows));
            }
            e += STEP - 1;
        } else if (stride == 1) {
            std::memcpy(row, from, b.hosts * sizeof(T));
        } else {
            for (int l = 0; l < b.hosts; ++l) row[stride * l] = from[l];
        }
    }
    return w + 2 * count;
}

template <class T> struct Wide;
template <> struct Wide<float> { typedef float type __attribute__((vector_size(64))); };
template <> struct Wide<double> { typedef double type __attribute__((vector_size(64))); };

// Outputs of a layer that are computed together, and vectors of each: their sums stay in the registers of a processor.
constexpr int ROWS = 6;
#ifdef __AVX512F__
constexpr int VECTORS = 4;
#else
constexpr int VECTORS = 1;
#endif

// A matrix and the inputs that it is multiplied with, at some lanes. What the sums begin with lies in registers, or is a
// bias in memory.
template <class T> struct Product {
    using V = typename Wide<T>::type;
    static constexpr int WIDTH = 64 / sizeof(T);
    const Block& block;
    const T *weight, *bias;
    int64_t down, along;
    int size, words;  // inputs, and words of an output: its register, and that of what its sum begins with
    const int32_t *inputs, *outputs;

    // Some outputs of some vectors of lanes: sums run over the inputs in order.
    template <int rows, int vectors> void some(int j, int lane) const {
        const int32_t* out = outputs + words * j;
        const T* matrix = weight + down * j;
        V sum[rows][vectors];
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < vectors; ++v)
                sum[r][v] = bias != nullptr ? V{} + bias[j + r] : at(out[words * r + 1], lane, v);
        for (int k = 0; k < size; ++k) {
            V value[vectors];
            for (int v = 0; v < vectors; ++v) value[v] = at(inputs[k], lane, v);
            for (int r = 0; r < rows; ++r) {
                const T w = matrix[r * down + k * along];
                for (int v = 0; v < vectors; ++v) sum[r][v] += value[v] * w;
            }
        }
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < vectors; ++v) at(out[words * r], lane, v) = sum[r][v];
    }

    template <int vectors> void all(int count, int lane) const {
        int j = 0;
        for (; j + ROWS <= count; j += ROWS) some<ROWS, vectors>(j, lane);
        for (; j < count; ++j) some<1, vectors>(j, lane);
    }

    V& at(int32_t place, int lane, int v) const { return reinterpret_cast<V*>(block.at<T>(place) + lane)[v]; }
};

// Words: tensor, where the weights begin, numbers from output to output and from input to input, inputs; where there is
// a bias, its tensor and where it begins; the registers of the inputs; for each output its register, and where there is
// no bias that of what its sum begins with.
template <class T, bool biased> const int32_t* linear(const Block& b, const int32_t* w, int count) {
    using P = Product<T>;
    const T* weight = reinterpret_cast<const T*>(b.memory[w[0]]) + w[1];
    const T* bias = biased ? reinterpret_cast<const T*>(b.memory[w[5]]) + w[6] : nullptr;
    const int32_t* inputs = w + (biased ? 7 : 5);
    const P product{b, weight, bias, w[2], w[3], w[4], biased ? 1 : 2, inputs, inputs + w[4]};
    int lane = 0;
    for (; lane + VECTORS * P::WIDTH <= b.lanes; lane += VECTORS * P::WIDTH) product.template all<VECTORS>(count, lane);
    for (; lane < b.lanes; lane += P::WIDTH) product.template all<1>(count, lane);
    return product.outputs + product.words * count;
}

// Words: the bits of epsilon as a double, the tensors of weight and bias and where they begin; for each element its
// register and its input.
template <class T> const int32_t* norm(const Block& b, const int32_t* w, int count) {
    using V = typename Wide<T>::type;
    constexpr int WIDTH = 64 / sizeof(T);
    double epsilon;
    std::memcpy(&epsilon, w, sizeof epsilon);
    const T* weight = reinterpret_cast<const T*>(b.memory[w[2]]) + w[3];
    const T* bias = reinterpret_cast<const T*>(b.memory[w[4]]) + w[5];
    w += 6;
    for (int lane = 0; lane < b.lanes; lane += WIDTH) {
        const auto input = [&](int e) { return *reinterpret_cast<const V*>(b.at<T>(w[2 * e + 1]) + lane); };
        V sum = {}, squares = {};
        for (int e = 0; e < count; ++e) sum += input(e);
        const V mean = sum / T(count);
        for (int e = 0; e < count; ++e) {
            const V apart = input(e) - mean;
            squares += apart * apart;
        }
        V scale;
        for (int i = 0; i < WIDTH; ++i) scale[i] = T(1) / std::sqrt(squares[i] / T(count) + T(epsilon));
        for (int e = 0; e < count; ++e)
            *reinterpret_cast<V*>(b.at<T>(w[2 * e]) + lane) = (input(e) - mean) * scale * weight[e] + bias[e];
    }
    return w + 2 * count;
}

template <class To, class From> inline To converted(From from) { return To(from); }
template <> inline uint8_t converted<uint8_t, float>(float from) { return from != 0; }
template <> inline uint8_t converted<uint8_t, double>(double from) { return from != 0; }
template <> inline uint8_t converted<uint8_t, int64_t>(int64_t from) { return from != 0; }

// What follows the instruction in the list; null where an index lies outside, or the operation is unknown.
const int32_t* carried_out(const Block& block, int32_t operation, const int32_t* words, int count) {
    switch (operation) {
#define BINARY(name, kind, type, formula) \
    case name##_##kind: return each_two<type, type>(block, words, count, [](type a, type b) -> type { return formula; });
#define COMPARE(name, kind, type, formula) \
    case name##_##kind: return each_two<uint8_t, type>(block, words, count, [](type a, type b) -> uint8_t { return formula; });
#define UNARY(name, kind, type, formula) \
    case name##_##kind: return each<type, type>(block, words, count, [](type a) -> type { return formula; });
#define CONVERSION(to_kind, to, from_kind, from) \
    case TO_##to_kind##_##from_kind: return each<to, from>(block, words, count, converted<to, from>);
        ESPER_BINARY(BINARY) ESPER_COMPARE(COMPARE) ESPER_UNARY(UNARY) ESPER_CONVERSIONS(CONVERSION)
#define OF_KIND(kind, type)                                              \
    case SELECT_##kind: return select<type>(block, words, count);       \
    case GATHER_##kind: return gather<type>(block, words, count);       \
    case LOOK_UP_##kind: return look_up<type>(block, words, count);     \
    case LOAD_##kind: return load<type>(block, words, count);           \
    case SPREAD_##kind: return spread<type>(block, words, count);       \
    case STORE_##kind: return keep<type>(block, words, count);
        OF_KIND(F, float) OF_KIND(D, double) OF_KIND(I, int64_t) OF_KIND(B, uint8_t)
        case LINEAR_F: return linear<float, false>(block, words, count);
        case LINEAR_D: return linear<double, false>(block, words, count);
        case AFFINE_F: return linear<float, true>(block, words, count);
        case AFFINE_D: return linear<double, true>(block, words, count);
        case NORM_F: return norm<float>(block, words, count);
        case NORM_D: return norm<double>(block, words, count);
        default: return nullptr;
    }
#undef CONVERSION
}

// The place in the list of an instruction that failed, -1 if all went well.
int64_t run(const int32_t* words, int64_t length, char* arena, const int64_t* memory, int64_t hosts) {
    for (int64_t first = 0; first < hosts; first += LANES) {
        const int here = hosts - first < LANES ? int(hosts - first) : LANES;
        const Block block{arena, memory, first, here, (here + STEP - 1) / STEP * STEP};
        for (const int32_t* w = words; w != words + length;) {
            const int32_t* next = carried_out(block, w[0], w + 2, w[1]);
            if (next == nullptr) return w - words;
            w = next;
        }
    }
    return -1;
}

}  // namespace esper

#define NAMED(name, kind, ...) #name "_" #kind " "
#define CONVERSION(to_kind, to, from_kind, from) "TO_" #to_kind "_" #from_kind " "
extern "C" const char* esper_control_operations() {
    return ESPER_BINARY(NAMED) ESPER_COMPARE(NAMED) ESPER_UNARY(NAMED) ESPER_CONVERSIONS(CONVERSION) ESPER_MEMORY(NAMED)
        ESPER_LAYERS(NAMED);
}
extern "C" int64_t esper_control_run(const int32_t* words, int64_t length, char* arena, const int64_t* memory,
                                     int64_t hosts) {
    return esper::run(words, length, arena, memory, hosts);
}
