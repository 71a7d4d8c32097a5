"""Why linear layers of diffusion transformers stay in BF16: the reasons, and which are firm."""

MODULATION = "modulation: an error in it is one in every token of its block"
TIME = "time and guidance embedding: every block depends on it, and it is one token"
INPUT = "an input projection: every block depends on it"
OUTPUT = "an output projection: its errors are the result's"
REFINER = "refines the prompt, once for a step: nothing to gain"
CONNECTOR = "connects another modality: every block depends on it"
# Hold against included_layers, which quantize activations as well.
REQUIRED = frozenset({MODULATION, TIME, INPUT, OUTPUT, REFINER, CONNECTOR})
# Hold against weight_only_layers. Modulation is one row for a step: what it costs is to be read,
# and with an FP8 weight alone the small image model lost next to nothing.
FIRM = REQUIRED - {MODULATION}
