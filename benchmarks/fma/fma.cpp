// Independent fused multiply-adds in registers: the most that a core can do.

namespace {

#ifdef __AVX512F__
constexpr int kBytes = 64;
#else
constexpr int kBytes = 32;
#endif
constexpr int kLanes = kBytes / sizeof(float);
typedef float Vector __attribute__((vector_size(kBytes)));

// Chains hide the latency of two units; with the two factors they fit into 16 registers.
#define EACH_CHAIN(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
constexpr int kChains = 12;

}  // namespace

// Performs so many rounds, and returns their operations; `sum` keeps them from being left out.
extern "C" double esper_fma(long rounds, float factor, float* sum) {
  Vector by = Vector{} + factor, more = Vector{} + (1.0f - factor), total{};
#define BEGIN(k) Vector chain##k = Vector{} + float(k);
  EACH_CHAIN(BEGIN)
  for (long i = 0; i < rounds; ++i) {
#define STEP(k)                      \
  chain##k = chain##k * by + more;   \
  __asm__("" : "+v"(chain##k));  // one after another
    EACH_CHAIN(STEP)
  }
#define ADD(k) total += chain##k;
  EACH_CHAIN(ADD)
  *sum = 0;
  for (int k = 0; k < kLanes; ++k) *sum += total[k];
  return 2.0 * kChains * kLanes * rounds;
}
