//! The weight of a product in a GPU's memory.

use crate::gpu::{Gpu, UPLOAD};
use crate::pack::{Codes, Form, PackedRows};
use nq_formats::Weight;
use nq_kernels::Activations;
use nq_runtime::interface::ActivationChoice;
use nq_runtime::weights::Census;
use nq_runtime::{Error, Result};
use rayon::prelude::*;
use wgpu::Buffer;

/// Inputs that share a scale where they are rounded to bytes: a unit.
const ROUNDED: Activations = Activations::Int8 { group: 32 };

/// A product's weight.
pub(crate) struct Linear {
    pub(crate) slices: Vec<Slice>,
    /// Its name, for errors.
    pub(crate) name: &'static str,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// True if inputs are rounded to bytes.
    pub(crate) rounds: bool,
    /// True if rows of a gate and of what it multiplies take turns.
    pub(crate) interleaved: bool,
    /// The experts whose rows stand one behind the other; 1 if it is no stack.
    pub(crate) experts: usize,
}

/// What a [`Linear`] is for.
#[derive(Clone, Copy)]
pub(crate) struct Purpose {
    /// Its name, for errors.
    pub(crate) name: &'static str,
    /// True if its parts are a gate and what it multiplies.
    pub(crate) gated: bool,
    /// The experts of which each part is a stack, or 1.
    pub(crate) experts: usize,
    /// To what inputs are rounded.
    pub(crate) choice: ActivationChoice,
}

/// Rows of a weight that are of one form and fit a binding.
pub(crate) struct Slice {
    pub(crate) form: Form,
    pub(crate) rows: usize,
    pub(crate) codes: Buffer,
    pub(crate) high: Buffer,
    pub(crate) affine: Buffer,
    /// `Slice` of the kernels.
    pub(crate) sizes: Buffer,
}

/// Where the rows of a slice come from.
struct Origin {
    form: Form,
    rows: Vec<(usize, usize)>, // a part, and a row of it
}

impl Linear {
    /// Repacks `parts`, whose rows stand one behind the other, or in turns if they are gates and what they multiply and
    /// of one form.
    ///
    /// # Errors
    /// What no kernel reads, and errors of the device.
    pub(crate) fn new(
        gpu: &Gpu,
        purpose: Purpose,
        parts: &[&Weight],
        census: &mut Census,
    ) -> Result<Self> {
        let Purpose {
            name,
            gated,
            experts,
            choice,
        } = purpose;
        let forms: Vec<Form> = (parts.iter())
            .map(|w| Form::of(name, w))
            .collect::<Result<_>>()?;
        let supports = |w: &Weight, rounding| {
            rounding == ROUNDED && Form::of(name, w).is_ok_and(|f| can_round(&f))
        };
        let activations = choice.resolve(parts, supports);
        let served = match activations {
            Activations::F32 => true,
            rounded => rounded == ROUNDED && forms.iter().all(can_round),
        };
        if !served {
            return Err(Error::Unsupported {
                engine: "nq over wgpu",
                what: name,
                expected: "inputs as f32, or as int8-g32 for codes in groups of 32 or more".into(),
                found: activations.to_string(),
            });
        }
        census.add(parts, activations);
        let interleaved = gated && forms.len() == 2 && forms[0] == forms[1];
        let mut slices = Vec::new();
        let outputs = parts.iter().map(|w| w.dims().rows).sum();
        if experts > 1 && gated && !interleaved {
            return Err(Error::Unsupported {
                engine: "nq over wgpu",
                what: name,
                expected: "gate and up of experts in one scheme, or --device cpu".into(),
                found: parts
                    .iter()
                    .map(|w| w.scheme_name())
                    .collect::<Vec<_>>()
                    .join(" and "),
            });
        }
        let expert_rows = outputs / experts;
        let width = match interleaved {
            true => expert_rows / 2,
            false => expert_rows,
        };
        let mut first = 0;
        for origin in origins(parts, &forms, interleaved) {
            let largest = origin.form.row_bytes().into_iter().max().unwrap_or(0);
            // Whole tiles of GEMM, and pairs of gates and what they multiply; or whole experts.
            let step = if experts > 1 { expert_rows } else { 64 };
            let most = gpu.most_bytes() / largest.max(1) / step * step;
            if most == 0 {
                return Err(Error::Unsupported {
                    engine: "nq over wgpu",
                    what: name,
                    expected: format!("{step} rows in a binding of the adapter, or --device cpu"),
                    found: format!("rows of {largest} bytes"),
                });
            }
            for rows in origin.rows.chunks(most) {
                let place = Place {
                    first,
                    width,
                    expert_rows: (experts > 1).then_some(expert_rows),
                };
                slices.push(Slice::new(gpu, name, origin.form, parts, rows, place)?);
                first += rows.len();
            }
        }
        Ok(Linear {
            slices,
            name,
            inputs: forms[0].units * crate::pack::UNIT,
            outputs,
            rounds: activations != Activations::F32,
            interleaved,
            experts,
        })
    }

    /// Bytes that it takes, all of which a token reads.
    pub(crate) fn bytes(&self) -> usize {
        let sizes = |s: &Slice| s.codes.size() + s.high.size() + s.affine.size();
        self.slices.iter().map(sizes).sum::<u64>() as usize
    }
}

/// True if kernels read such weights with inputs in bytes: groups are whole units.
fn can_round(form: &Form) -> bool {
    matches!(form.codes, Codes::Integers(_)) && form.shift >= 5
}

/// The rows of each run of parts of one form.
fn origins(parts: &[&Weight], forms: &[Form], interleaved: bool) -> Vec<Origin> {
    if interleaved {
        let rows = (0..parts[0].dims().rows).flat_map(|row| [(0, row), (1, row)]);
        return vec![Origin {
            form: forms[0],
            rows: rows.collect(),
        }];
    }
    let mut all: Vec<Origin> = Vec::new();
    for (part, (weight, &form)) in parts.iter().zip(forms).enumerate() {
        let rows = (0..weight.dims().rows).map(|row| (part, row));
        match all.last_mut().filter(|last| last.form == form) {
            Some(last) => last.rows.extend(rows),
            None => all.push(Origin {
                form,
                rows: rows.collect(),
            }),
        }
    }
    all
}

/// Where a slice's outputs go.
#[derive(Clone, Copy)]
struct Place {
    /// The number of its first row among all of the product.
    first: usize,
    /// Outputs of the product, or of an expert.
    width: usize,
    /// Rows of an expert, if it is one of a stack of them.
    expert_rows: Option<usize>,
}

impl Slice {
    fn new(
        gpu: &Gpu,
        name: &str,
        form: Form,
        parts: &[&Weight],
        rows: &[(usize, usize)],
        place: Place,
    ) -> Result<Self> {
        let [low, high, affine] = form.row_bytes();
        let buffer = |bytes: usize| gpu.buffer(name, bytes * rows.len());
        // Slices of stacks are told apart by experts, not by rows.
        let (first, expert0) = match place.expert_rows {
            Some(each) => (0, place.first / each),
            None => (place.first, 0),
        };
        let slice = Slice {
            form,
            rows: rows.len(),
            codes: buffer(low)?,
            high: buffer(high)?,
            affine: buffer(affine)?,
            sizes: gpu.uniform(&[
                rows.len() as u32,
                form.units as u32,
                first as u32,
                place.width as u32,
                form.groups() as u32,
                form.shift,
                expert0 as u32,
                place.expert_rows.unwrap_or(0) as u32,
            ])?,
        };
        let together = (UPLOAD / low).max(1);
        for (index, rows) in rows.chunks(together).enumerate() {
            let packed: Vec<PackedRows> = (rows.par_chunks(64))
                .map(|rows| {
                    let mut packed = PackedRows::default();
                    rows.iter()
                        .for_each(|&(part, row)| packed.push(&form, parts[part], row));
                    packed
                })
                .collect();
            let mut at = [low, high, affine].map(|bytes| bytes * index * together);
            for part in &packed {
                let buffers = [&slice.codes, &slice.high, &slice.affine];
                let words = [&part.codes, &part.high, &part.affine];
                for ((buffer, words), at) in buffers.into_iter().zip(words).zip(&mut at) {
                    let bytes: &[u8] = bytemuck::cast_slice(words);
                    if !bytes.is_empty() {
                        gpu.write(buffer, *at, bytes);
                    }
                    *at += bytes.len();
                }
            }
            // Copies on their way to the device are held until they are there.
            gpu.finish()?;
        }
        Ok(slice)
    }
}
