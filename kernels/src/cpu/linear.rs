//! The Linear operation: weights repacked for this CPU, and the product.

use super::Cpu;
use crate::error::{Error, Result};
use crate::registry::{Activations, KernelSet};
use nq_formats::Weight;

/// What is done with a product before it leaves the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// `y = x w^T`.
    Store,
    /// `y += x w^T` (the residual).
    Add,
    /// Two parts of equal height, gate and up: `y = silu(x gate^T) * (x up^T)`.
    SiluMul,
}

/// One or several weights with the same input, repacked for this CPU's kernels and
/// multiplied in one pass (QKV; gate and up).
pub struct Linear {
    parts: Vec<Weight>,
    in_features: usize,
    out_features: usize,
    bytes: usize,
}

impl Linear {
    /// Repacks `parts`, stacked along their outputs.
    ///
    /// # Errors
    /// [`Error::NoKernel`] if the registry has no row for a part's scheme with these
    /// activations; [`Error::Shape`] if the parts' inputs differ.
    pub fn new(
        _cpu: &Cpu,
        parts: &[&Weight],
        _activations: Activations,
        _kernels: KernelSet,
    ) -> Result<Self> {
        let in_features = parts.first().map_or(0, |w| w.dims().1);
        if let Some(w) = parts.iter().find(|w| w.dims().1 != in_features) {
            return Err(Error::Shape {
                op: "linear",
                what: "inputs of a stacked weight",
                expected: in_features.to_string(),
                found: w.dims().1.to_string(),
            });
        }
        Ok(Linear {
            in_features,
            out_features: parts.iter().map(|w| w.dims().0).sum(),
            bytes: parts.iter().map(|w| w.bytes()).sum(),
            parts: parts.iter().map(|&w| w.clone()).collect(),
        })
    }

    /// Inputs.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Outputs of all parts together.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Bytes one pass reads from memory: the packed codes and scales.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Cpu {
    /// Multiplies `x` `[m, in]` with a [`Linear`] into `y` `[m, out]` (`[m, out / 2]` for
    /// [`Epilogue::SiluMul`]), all row-major f32.
    ///
    /// # Errors
    /// [`Error::Shape`] if a slice's length does not fit.
    pub fn linear(&self, w: &Linear, x: &[f32], y: &mut [f32], epilogue: Epilogue) -> Result<()> {
        let (k, n) = (w.in_features, w.out_features);
        let m = x.len() / k.max(1);
        let width = if epilogue == Epilogue::SiluMul {
            n / 2
        } else {
            n
        };
        if x.len() != m * k || y.len() != m * width {
            return Err(Error::Shape {
                op: "linear",
                what: "x and y",
                expected: format!("[{m}, {k}] and [{m}, {width}]"),
                found: format!("{} and {} values", x.len(), y.len()),
            });
        }
        // Columns of the product in blocks: dequantize a block of weight rows once, use
        // it for all rows of x.
        const BLOCK: usize = 64;
        let mut product = vec![0f32; m * n];
        let starts: Vec<usize> = w
            .parts
            .iter()
            .scan(0, |at, p| {
                let start = *at;
                *at += p.dims().0;
                Some(start)
            })
            .collect();
        let out = SharedSlice(product.as_mut_ptr());
        let tasks: Vec<(usize, usize)> = w
            .parts
            .iter()
            .enumerate()
            .flat_map(|(p, part)| (0..part.dims().0).step_by(BLOCK).map(move |o| (p, o)))
            .collect();
        self.team().run(tasks.len(), |t| {
            let (p, o0) = tasks[t];
            let part = &w.parts[p];
            let rows = BLOCK.min(part.dims().0 - o0);
            let mut tile = vec![0f32; rows * k];
            for (r, tile) in tile.chunks_exact_mut(k).enumerate() {
                part.dequantize_row(o0 + r, tile)
                    .expect("checked when the weight was read");
            }
            let column = starts[p] + o0;
            // SAFETY: tasks cover disjoint column ranges `column .. column + rows` of the
            // `[m, n]` product, which outlives the team's run; strides are in elements.
            unsafe {
                gemm::gemm(
                    m,
                    rows,
                    k,
                    out.get().add(column),
                    1,
                    n as isize,
                    false,
                    x.as_ptr(),
                    1,
                    k as isize,
                    tile.as_ptr(),
                    k as isize,
                    1,
                    0.0,
                    1.0,
                    false,
                    false,
                    false,
                    gemm::Parallelism::None,
                );
            }
        });
        match epilogue {
            Epilogue::Store => y.copy_from_slice(&product),
            Epilogue::Add => y.iter_mut().zip(&product).for_each(|(y, p)| *y += p),
            Epilogue::SiluMul => {
                for (y, p) in y.chunks_exact_mut(width).zip(product.chunks_exact(n)) {
                    let (gate, up) = p.split_at(width);
                    crate::reference::silu_mul(gate, up, y);
                }
            }
        }
        Ok(())
    }
}

/// A pointer that tasks writing disjoint elements share.
struct SharedSlice(*mut f32);

// SAFETY: only dereferenced at disjoint elements (see the use above).
unsafe impl Sync for SharedSlice {}

impl SharedSlice {
    fn get(&self) -> *mut f32 {
        self.0
    }
}
