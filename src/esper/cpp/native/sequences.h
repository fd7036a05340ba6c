// Sequences: embeddings, attention, dropout, on rows of lanes [T][D].

#pragma once

#include "lanes.h"

#define ESPER_SEQUENCES(X)

namespace esper {}
