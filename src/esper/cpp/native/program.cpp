// The loop that executes the programs of many hosts.
//
// tolaria/executors/native/program.py writes programs; it lists the same operations in the same order. An operand is a
// place in one of a host's spaces (its weights, their gradients, a batch, working memory), so hosts of equal structure
// share a program. A host passes over all its data before the next one begins, so that its weights stay in the
// processor's cache; a batch passes in chunks, so that their features stay there too. A host uses only its own spaces
// and those of the thread that runs it, so its results depend on no other host.

#include "convolution.h"
#include "functions.h"
#include "normalizations.h"
#include "optimizers.h"
#include "pooling.h"
#include "sequences.h"
#include "tensors.h"

#include <algorithm>
#include <vector>

// The type of all numbers: float, and double where modules are compared with PyTorch.
#ifndef ESPER_NUMBER
#define ESPER_NUMBER float
#endif

// X(name, operands): a letter for each operand.
//     x  numbers, or rows of lanes    X  the same; a sum over the batch, which is cleared before its first chunk
//     m  numbers of each example      e  numbers of 8 bytes of each example      l  numbers of 8 bytes
#define ESPER_OPERATIONS(X)                                                                                            \
    ESPER_CONVOLUTIONS(X) ESPER_NORMALIZATIONS(X) ESPER_ACTIVATIONS(X) ESPER_POOLING(X) ESPER_SEQUENCES(X) ESPER_TENSORS(X)                                             \
    X(SQUARE_NORM, "xx") X(CLIP, "x") X(SGD, "xxxxxx") X(ADAMW, "xxxxxxxl")

namespace esper {

#define X(name, operands) name,
enum Operation : int32_t { ESPER_OPERATIONS(X) NUM_OPERATIONS };
#undef X

#define X(name, operands) operands,
constexpr const char* OPERANDS_OF[] = {ESPER_OPERATIONS(X)};
#undef X

// Layers of two halves: all chunks of a batch pass the first one before any passes the second one.
inline bool has_halves(const Instruction& i) {
    return i.operation == BATCH_NORM || i.operation == BATCH_NORM_BACKWARD || i.operation == BARRIER;
}

// The optimizer's instructions, which need the gradients of the whole batch.
inline bool is_of_optimizer(const Instruction& i) { return i.operation >= SQUARE_NORM; }

template <class T> struct Host {
    const int64_t *base, *size;  // addresses of the spaces, and their bytes
    int64_t spaces;
    Chunk chunk;

    int64_t step_of(const Instruction& i, int k) const { return i.space[k] <= LOCAL ? chunk.stride : 1; }

    // Bytes of operand k.
    int64_t bytes_of(const Instruction& i, int k) const {
        const char letter = OPERANDS_OF[i.operation][k];
        const int64_t each = letter == 'm' || letter == 'e' ? chunk.lanes : step_of(i, k);
        return i.extent[k] * each * unit_of(letter);
    }

    static int64_t unit_of(char letter) { return letter == 'l' || letter == 'e' ? 8 : sizeof(T); }

    char* at(const Instruction& i, int k) const {
        if (i.space[k] == NOTHING) return nullptr;
        return reinterpret_cast<char*>(base[i.space[k]]) +
               i.offset[k] * step_of(i, k) * unit_of(OPERANDS_OF[i.operation][k]);
    }

    // Whether the instruction exists and its operands lie in the memory that the host was given.
    bool fits(const Instruction& i) const {
        if (i.operation < 0 || i.operation >= NUM_OPERATIONS) return false;
        const char* letters = OPERANDS_OF[i.operation];
        for (int k = 0; letters[k]; ++k) {
            if (i.space[k] == NOTHING) continue;
            if (i.space[k] < 0 || i.space[k] >= spaces || i.offset[k] < 0 || i.extent[k] < 0) return false;
            const int64_t before = i.offset[k] * step_of(i, k) * unit_of(letters[k]);
            if (before + bytes_of(i, k) > size[i.space[k]]) return false;
        }
        return labels_fit(i);
    }

    // Clears what the chunks of a batch add to.
    void clear_sums(const Instruction& i) const {
        const char* letters = OPERANDS_OF[i.operation];
        for (int k = 0; letters[k]; ++k)
            if (letters[k] == 'X' && i.space[k] != NOTHING && bytes_of(i, k)) std::memset(at(i, k), 0, bytes_of(i, k));
    }

    // Whether every label has a class, which depends on the batch.
    bool labels_fit(const Instruction& i) const {
        if (i.operation != CROSS_ENTROPY) return true;
        const int64_t* labels = reinterpret_cast<const int64_t*>(at(i, 1));
        for (int64_t k = 0; k < int64_t(chunk.lanes) * i.size[1]; ++k)
            if (labels[k] >= i.size[0]) return false;
        return true;
    }

    void run(const Instruction& i, int half) const {
        if (chunk.first() && half & SUMS_OF_BATCH) clear_sums(i);
        Call<T> call{i.size, i.flag, i.number, {}, half, chunk};
        for (int k = 0; OPERANDS_OF[i.operation][k]; ++k) call.p[k] = reinterpret_cast<T*>(at(i, k));
        switch (i.operation) {
#define X(name, operands) case name: return run_##name(call);
            ESPER_OPERATIONS(X)
#undef X
        }
    }
};

// The examples of a pass over the data. Each host takes them in its own order, or all take them as they lie.
struct Examples {
    const void* images;     // [available][numbers], null where the batch lies in the spaces of the hosts already
    const int64_t* labels;  // [available][labels_each], or [hosts][count][labels_each] with own_labels
    const int64_t* order;   // [hosts][count] places of examples, -1 after the last; null: 0 to count - 1
    const void* table;     // [channels][256] numbers; then images are bytes that stand for them. null: numbers
    const int64_t* moves;  // [hosts][count][3]: window down and right, and whether it is flipped. null: as they are
    int64_t available, numbers, count, batch;
    int64_t padded;  // fill a batch with examples of label -1 up to its stride, which is fastest
    int64_t channels, height, width, border;  // of an image; black pixels around it, for windows
    int64_t own_labels, labels_each;
    int64_t first;         // number of the first batch in its pass
    int64_t outputs_each;  // numbers of an example in OUTPUTS and OUT_GRADS
    int64_t goes_on;       // a program goes on behind its barrier, with the rows of the same thread
    int64_t keys_each;     // numbers of each batch in KEYS
};

// The working memory of one thread, and their sizes in bytes.
struct Memory {
    void *rows, *local, *numbers, *scratch, *images;
    int64_t* labels;
    int64_t rows_size, local_size, numbers_size, scratch_size;
};

// The hosts, shared by all threads; `next` is the first position of `turn` that no thread has taken.
struct Hosts {
    const Instruction* program;
    const int64_t *first, *count;  // instructions of each host
    const int64_t* chunk;          // how many examples of a batch pass through its layers together
    const int64_t *base, *size;    // [hosts][spaces] addresses, bytes
    const int64_t* turn;           // hosts in the order in which they are run
    int64_t* next;
    int64_t hosts, spaces;
};

constexpr int64_t DONE = -1, NO_SUCH_EXAMPLE = -2;

template <class T> class Pass {
  public:
    Pass(const Hosts& hosts, const Examples& examples, const Memory& memory)
        : hosts_(hosts), examples_(examples), memory_(memory), base_(hosts.spaces), size_(hosts.spaces) {}

    // Runs hosts until none is left. Returns DONE, or what went wrong: the number of an instruction that does not fit.
    int64_t run() {
        for (int64_t turn; (turn = __atomic_fetch_add(hosts_.next, 1, __ATOMIC_RELAXED)) < hosts_.hosts;)
            if (const int64_t failed = run_host(hosts_.turn[turn]); failed != DONE) return failed;
        return DONE;
    }

  private:
    int64_t run_host(int64_t h) {
        for (int64_t k = 0; k < hosts_.spaces; ++k) {
            base_[k] = hosts_.base[h * hosts_.spaces + k];
            size_[k] = hosts_.size[h * hosts_.spaces + k];
        }
        give(NUMBERS, memory_.numbers, memory_.numbers_size);
        give(SCRATCH, memory_.scratch, memory_.scratch_size);
        for (int k = INPUTS; k <= IN_GRADS; ++k) batch_[k] = base_[k];
        if (examples_.images) batch_[INPUTS] = address(memory_.images), batch_[LABELS] = address(memory_.labels);
        lanes_ = -1;
        number_ = examples_.first;
        next_keys(number_);
        if (!examples_.images) return run_batch(h, static_cast<int>(examples_.batch), true);
        for (int64_t start = 0; start < examples_.count; start += examples_.batch) {
            const int found = left(h, start);
            if (!found) break;
            const int lanes = examples_.padded ? stride_of(found) : found;
            if (!gather(h, start, found, lanes)) return NO_SUCH_EXAMPLE;
            // the first batch is the largest: what fits it fits the others, unless it was the last one with keys
            if (const int64_t failed = run_batch(h, lanes, start == 0 || examples_.keys_each); failed != DONE)
                return failed;
            ++number_;
            next_keys(1);
        }
        return DONE;
    }

    // Each chunk of a batch passes all layers up to the next one that needs a sum over the batch, then the next chunk.
    int64_t run_batch(int64_t h, int lanes, bool check) {
        const int size = static_cast<int>(std::min<int64_t>(hosts_.chunk[h], lanes));
        if (lanes != lanes_ && !examples_.goes_on) clear_last(lanes, size);
        lanes_ = lanes;
        const auto* labels = reinterpret_cast<const int64_t*>(batch_[LABELS]);
        int64_t weight = 0;
        for (int64_t k = 0; labels && k < lanes * examples_.labels_each; ++k) weight += labels[k] >= 0;
        const int64_t first = hosts_.first[h], last = first + hosts_.count[h];
        for (int64_t begin = first, end; begin <= last; begin = end + 1) {
            for (end = begin; end < last && (lanes <= size || !has_halves(hosts_.program[end]));) ++end;
            for (int before = 0; before < lanes; before += size) {
                const Host<T> host = of_chunk(std::min(size, lanes - before), before, lanes, weight);
                if (begin > first) host.run(hosts_.program[begin - 1], FEATURES);
                for (int64_t i = begin; i < std::min(end + 1, last); ++i) {
                    const Instruction& next = hosts_.program[i];
                    if (is_of_optimizer(next) && !host.chunk.last()) continue;
                    if (!(check && host.chunk.first() ? host.fits(next) : host.labels_fit(next))) return i;
                    host.run(next, i == end ? SUMS_OF_BATCH : BOTH);
                }
            }
        }
        return DONE;
    }

    // Passes over the keys of so many batches.
    void next_keys(int64_t batches) {
        if (!examples_.keys_each) return;
        const int64_t bytes = batches * examples_.keys_each * int64_t(sizeof(int64_t));
        base_[KEYS] += bytes;
        size_[KEYS] -= bytes;
    }

    // Gives the host the rows of a chunk that begins after so many lanes.
    void give_rows(int before, int stride) {
        const int64_t of_lane = memory_.rows_size / stride_of(static_cast<int>(examples_.batch));
        give(ROWS, static_cast<char*>(memory_.rows) + before * of_lane, stride * of_lane);
        give(LOCAL, memory_.local, memory_.local_size);
    }

    // Clears the rows of the last chunk, because lanes beyond the last example must be zero.
    void clear_last(int lanes, int size) {
        const int before = (lanes - 1) / size * size, stride = stride_of(lanes - before);
        if (before + stride == lanes) return;
        give_rows(before, stride);
        for (const int space : {ROWS, LOCAL})
            if (size_[space]) std::memset(reinterpret_cast<void*>(base_[space]), 0, size_[space]);
    }

    // The host with the rows, images and labels of a chunk.
    Host<T> of_chunk(int lanes, int before, int batch, int64_t weight) {
        const int stride = stride_of(lanes);
        if (before && lanes != stride) std::memset(memory_.local, 0, memory_.local_size);  // other chunks used it
        give_rows(before, stride);
        const int64_t number = sizeof(T), outputs = examples_.outputs_each * number;
        const int64_t inputs = examples_.numbers * number;
        const int64_t each[] = {inputs, examples_.labels_each * 8, outputs, outputs, inputs};
        for (int k = INPUTS; k <= IN_GRADS; ++k) {
            base_[k] = batch_[k] + before * each[k - INPUTS];
            size_[k] = lanes * each[k - INPUTS];
        }
        return {base_.data(), size_.data(), hosts_.spaces, {lanes, stride, before, batch, double(weight), number_}};
    }

    // Examples of the batch that begins here; a host with fewer examples than the others ends with -1.
    int left(int64_t h, int64_t start) const {
        int found = static_cast<int>(std::min(examples_.batch, examples_.count - start));
        if (examples_.order)
            while (found && examples_.order[h * examples_.count + start + found - 1] == -1) --found;
        return found;
    }

    // Copies a batch of images and labels; false if the data have no such example.
    bool gather(int64_t h, int64_t start, int found, int lanes) {
        const int64_t numbers = examples_.numbers;
        T* images = static_cast<T*>(memory_.images);
        for (int k = 0; k < found; ++k) {
            const int64_t place = h * examples_.count + start + k;
            const int64_t at = examples_.order ? examples_.order[place] : start + k;
            if (at < 0 || at >= examples_.available) return false;
            const int64_t* move = examples_.moves ? examples_.moves + place * 3 : nullptr;
            if (const T* table = static_cast<const T*>(examples_.table))
                copy_image(static_cast<const uint8_t*>(examples_.images) + at * numbers, table, move, images + k * numbers);
            else
                copy_image(static_cast<const T*>(examples_.images) + at * numbers, nullptr, move, images + k * numbers);
            const int64_t each = examples_.labels_each, label = (examples_.own_labels ? place : at) * each;
            std::copy_n(examples_.labels + label, each, memory_.labels + k * each);
        }
        std::fill_n(images + found * numbers, (lanes - found) * numbers, T(0));
        const int64_t each = examples_.labels_each;
        std::fill_n(memory_.labels + found * each, (lanes - found) * each, int64_t(-1));
        return true;
    }

    // An image, or a window of it; what lies beyond its border is black.
    template <class Stored> void copy_image(const Stored* from, const T* table, const int64_t* move, T* to) const {
        const int64_t height = examples_.height, width = examples_.width;
        for (int64_t c = 0; c < examples_.channels; ++c, from += height * width) {
            const T* of_channel = table ? table + c * 256 : nullptr;
            const auto value = [&](Stored x) {
                if constexpr (sizeof(Stored) == 1) return of_channel[x];
                else return T(x);
            };
            if (!move) {
                for (int64_t i = 0; i < height * width; ++i) *to++ = value(from[i]);
                continue;
            }
            for (int64_t y = 0; y < height; ++y) {
                const int64_t row = y + move[0] - examples_.border;
                for (int64_t x = 0; x < width; ++x) {
                    const int64_t column = (move[2] ? width - 1 - x : x) + move[1] - examples_.border;
                    const bool inside = row >= 0 && row < height && column >= 0 && column < width;
                    *to++ = value(inside ? from[row * width + column] : Stored(0));
                }
            }
        }
    }

    static int64_t address(const void* memory) { return reinterpret_cast<int64_t>(memory); }

    void give(int space, const void* memory, int64_t size) {
        base_[space] = address(memory);
        size_[space] = size;
    }

    static int stride_of(int lanes) { return (lanes + LANES - 1) / LANES * LANES; }

    const Hosts& hosts_;
    const Examples& examples_;
    const Memory& memory_;
    std::vector<int64_t> base_, size_;  // of the host that runs
    int64_t batch_[IN_GRADS + 1] = {};  // where what each example of its batch has begins
    int lanes_ = -1;                    // of its last batch
    int64_t number_ = 0;                // of the batch that runs
};

}  // namespace esper

extern "C" {

// Runs hosts that no other thread has taken. See Pass::run for the result.
int64_t esper_run(const esper::Hosts* hosts, const esper::Examples* examples, const esper::Memory* memory) {
    return esper::Pass<ESPER_NUMBER>(*hosts, *examples, *memory).run();
}

#define X(name, operands) #name " "
const char* esper_operations() { return ESPER_OPERATIONS(X); }
#undef X

int64_t esper_instruction_bytes() { return sizeof(esper::Instruction); }

int64_t esper_lanes() { return esper::LANES; }
}
