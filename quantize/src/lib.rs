//! nq: quantization methods, calibration, the layer-streamed pipeline and the guard
