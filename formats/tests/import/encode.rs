//! Checkpoints in other tools' formats, encoded element by element.

use crate::common::{Rng, names, random_dense};
use half::{bf16, f16};
use nq_formats::Exactness;
use nq_formats::serialize::write_tensors;
use nq_formats::{Checkpoint, Tensor, Weight, nq};
use nq_model::names::{Shape, is_layer_linear, parameters, tensor_name};
use nq_model::{DType, Dims};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

pub(crate) const SHAPE: &str = r#""architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","hidden_size":32,
"intermediate_size":64,"num_hidden_layers":1,"num_attention_heads":2,"num_key_value_heads":1,
"head_dim":16,"vocab_size":40,"max_position_embeddings":32,"rms_norm_eps":1e-6,
"rope_theta":10000.0,"tie_word_embeddings":true,"eos_token_id":3"#;

/// A quantized weight as numbers: `w[o][i] = scale[o][g] * (code[o][i] - zero[o][g])`.
pub(crate) struct Numbers {
    pub(crate) bits: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) groups: usize,
    pub(crate) codes: Vec<u32>,  // [rows, cols], unsigned
    pub(crate) scales: Vec<f32>, // [rows, groups]
    pub(crate) zeros: Vec<u32>,  // [rows, groups], unsigned
    pub(crate) g_idx: Vec<usize>,
}

impl Numbers {
    pub(crate) fn draw(rng: &mut Rng, like: &Like, rows: usize, cols: usize) -> Numbers {
        let groups = if like.group == 0 {
            1
        } else {
            cols.div_ceil(like.group)
        };
        let size = if like.group == 0 { cols } else { like.group };
        let mut code = |n: usize| (0..n).map(|_| rng.below(1 << like.bits) as u32).collect();
        let codes = code(rows * cols);
        let mut zeros: Vec<u32> = code(rows * groups);
        if like.symmetric {
            zeros.fill(1 << (like.bits - 1));
        }
        let scales = (0..rows * groups)
            .map(|_| (like.round)(rng.signed() / 50.0))
            .collect();
        let mut g_idx: Vec<usize> = (0..cols).map(|i| i / size).collect();
        if like.shuffled {
            for i in (1..cols).rev() {
                g_idx.swap(i, rng.below(i + 1));
            }
        }
        Numbers {
            bits: like.bits,
            rows,
            cols,
            groups,
            codes,
            scales,
            zeros,
            g_idx,
        }
    }

    pub(crate) fn value(&self, o: usize, i: usize) -> f32 {
        let at = o * self.groups + self.g_idx[i];
        let q = self.codes[o * self.cols + i] as f32 - self.zeros[at] as f32;
        self.scales[at] * q
    }
}

/// The kind of numbers to draw.
pub(crate) struct Like {
    pub(crate) bits: usize,
    pub(crate) group: usize, // 0: the whole row
    pub(crate) symmetric: bool,
    pub(crate) shuffled: bool,
    pub(crate) round: fn(f32) -> f32,
}

pub(crate) fn to_f16(v: f32) -> f32 {
    f16::from_f32(v).to_f32()
}

pub(crate) fn to_bf16(v: f32) -> f32 {
    bf16::from_f32(v).to_f32()
}

pub(crate) const LIKE: Like = Like {
    bits: 4,
    group: 16,
    symmetric: false,
    shuffled: false,
    round: to_f16,
};

/// An I32 tensor in which `put` sets the bits of element `(r, c)` of `[rows, cols]`.
pub(crate) fn int_tensor(
    rows: usize,
    cols: usize,
    put: impl Fn(&mut dyn FnMut(usize, usize, u32, usize)),
) -> Tensor {
    let mut words = vec![0u32; rows * cols];
    put(&mut |r, c, value, shift| words[r * cols + c] |= value << shift);
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    Tensor::new(DType::I32, vec![rows, cols], bytes.into()).unwrap()
}

pub(crate) fn float_tensor(
    dtype: DType,
    shape: &[usize],
    values: impl Iterator<Item = f32>,
) -> Tensor {
    let bytes: Vec<u8> = values
        .flat_map(|v| match dtype {
            DType::F16 => f16::from_f32(v).to_le_bytes().to_vec(),
            DType::BF16 => bf16::from_f32(v).to_le_bytes().to_vec(),
            _ => v.to_le_bytes().to_vec(),
        })
        .collect();
    Tensor::new(dtype, shape.to_vec(), bytes.into()).unwrap()
}

/// `[groups, rows]` from `[rows, groups]`.
pub(crate) fn turned(n: &Numbers) -> impl Iterator<Item = f32> {
    (0..n.groups).flat_map(move |g| (0..n.rows).map(move |o| n.scales[o * n.groups + g]))
}

pub(crate) type Encoded = Vec<(&'static str, Tensor)>;

pub(crate) fn gptq(n: &Numbers, less_one: bool) -> Encoded {
    let pf = 32 / n.bits;
    let mask = (1u32 << n.bits) - 1;
    let qweight = int_tensor(n.cols / pf, n.rows, |set| {
        for o in 0..n.rows {
            for i in 0..n.cols {
                set(i / pf, o, n.codes[o * n.cols + i], n.bits * (i % pf));
            }
        }
    });
    let qzeros = int_tensor(n.groups, n.rows / pf, |set| {
        for o in 0..n.rows {
            for g in 0..n.groups {
                let z = n.zeros[o * n.groups + g];
                let z = if less_one {
                    z.wrapping_sub(1) & mask
                } else {
                    z
                };
                set(g, o / pf, z, n.bits * (o % pf));
            }
        }
    });
    let g_idx: Vec<u8> = n
        .g_idx
        .iter()
        .flat_map(|g| (*g as u32).to_le_bytes())
        .collect();
    vec![
        (".qweight", qweight),
        (".qzeros", qzeros),
        (
            ".scales",
            float_tensor(DType::F16, &[n.groups, n.rows], turned(n)),
        ),
        (
            ".g_idx",
            Tensor::new(DType::I32, vec![n.cols], g_idx.into()).unwrap(),
        ),
    ]
}

pub(crate) fn awq(n: &Numbers) -> Encoded {
    // The nibble of a word that holds output `o`: the inverse of 0 2 4 6 1 3 5 7.
    const NIBBLE: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
    let qweight = int_tensor(n.cols, n.rows / 8, |set| {
        for o in 0..n.rows {
            for i in 0..n.cols {
                set(i, o / 8, n.codes[o * n.cols + i], 4 * NIBBLE[o % 8]);
            }
        }
    });
    let qzeros = int_tensor(n.groups, n.rows / 8, |set| {
        for o in 0..n.rows {
            for g in 0..n.groups {
                set(g, o / 8, n.zeros[o * n.groups + g], 4 * NIBBLE[o % 8]);
            }
        }
    });
    vec![
        (".qweight", qweight),
        (".qzeros", qzeros),
        (
            ".scales",
            float_tensor(DType::F16, &[n.groups, n.rows], turned(n)),
        ),
    ]
}

pub(crate) fn packed(n: &Numbers, symmetric: bool, scale_type: DType) -> Encoded {
    let pf = 32 / n.bits;
    let codes = int_tensor(n.rows, n.cols.div_ceil(pf), |set| {
        for o in 0..n.rows {
            for i in 0..n.cols {
                set(o, i / pf, n.codes[o * n.cols + i], n.bits * (i % pf));
            }
        }
    });
    let shape: Vec<u8> = [n.rows, n.cols]
        .iter()
        .flat_map(|d| (*d as i64).to_le_bytes())
        .collect();
    let scales = float_tensor(scale_type, &[n.rows, n.groups], n.scales.iter().copied());
    let mut all = vec![
        (".weight_packed", codes),
        (".weight_scale", scales),
        (
            ".weight_shape",
            Tensor::new(DType::I64, vec![2], shape.into()).unwrap(),
        ),
    ];
    if !symmetric {
        let zeros = int_tensor(n.rows.div_ceil(pf), n.groups, |set| {
            for o in 0..n.rows {
                for g in 0..n.groups {
                    set(o / pf, g, n.zeros[o * n.groups + g], n.bits * (o % pf));
                }
            }
        });
        all.push((".weight_zero_point", zeros));
    }
    let plain = n.g_idx.is_sorted();
    let g_idx: Vec<u8> = n
        .g_idx
        .iter()
        .flat_map(|g| (*g as u32).to_le_bytes())
        .collect();
    if !plain {
        all.push((
            ".weight_g_idx",
            Tensor::new(DType::I32, vec![n.cols], g_idx.into()).unwrap(),
        ));
    }
    all
}

pub(crate) fn signed_bytes(n: &Numbers, symmetric: bool) -> Encoded {
    let bytes = |values: &[u32]| -> Vec<u8> {
        values
            .iter()
            .map(|v| (*v as i32 - 128) as i8 as u8)
            .collect()
    };
    let tensor = |shape: [usize; 2], v: &[u32]| {
        Tensor::new(DType::I8, shape.to_vec(), bytes(v).into()).unwrap()
    };
    let scales = float_tensor(DType::BF16, &[n.rows, n.groups], n.scales.iter().copied());
    let mut all = vec![
        (".weight", tensor([n.rows, n.cols], &n.codes)),
        (".weight_scale", scales),
    ];
    if !symmetric {
        all.push((".weight_zero_point", tensor([n.rows, n.groups], &n.zeros)));
    }
    all
}

/// A folder in one of the formats, and the numbers of its Linears.
pub(crate) struct Folder {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) tensors: Vec<(String, Tensor)>,
    pub(crate) expected: BTreeMap<String, Numbers>,
}

impl Folder {
    /// `like` may differ by Linear.
    pub(crate) fn new(
        settings: &str,
        like: impl Fn(&str) -> Like,
        encode: impl Fn(&Numbers) -> Encoded,
    ) -> Folder {
        Folder::of(SHAPE, settings, is_layer_linear, like, encode)
    }

    /// The same of another shape, with the Linears quantized for which `quantized` says so.
    pub(crate) fn of(
        shape: &str,
        settings: &str,
        quantized: impl Fn(&str) -> bool,
        like: impl Fn(&str) -> Like,
        encode: impl Fn(&Numbers) -> Encoded,
    ) -> Folder {
        let dir = tempfile::tempdir().unwrap();
        let config = format!(r#"{{{shape},"quantization_config":{settings}}}"#);
        let shape = nq_formats::config::parse(Path::new("c"), config.as_bytes()).unwrap();
        fs::write(dir.path().join("config.json"), config).unwrap();
        let mut rng = Rng(11);
        let mut tensors = Vec::new();
        let mut expected = BTreeMap::new();
        for (name, shape) in parameters(&shape) {
            match shape {
                Shape::Matrix(rows, cols) if quantized(&name) => {
                    let numbers = Numbers::draw(&mut rng, &like(&name), rows, cols);
                    for (suffix, tensor) in encode(&numbers) {
                        tensors.push((format!("{name}{suffix}"), tensor));
                    }
                    expected.insert(name, numbers);
                }
                _ => {
                    let dims = match shape {
                        // The channels of a convolution of four inputs.
                        Shape::Vector(n) if name.ends_with("conv1d") => vec![n / 4, 1, 4],
                        shape => shape.dims(),
                    };
                    tensors.push((tensor_name(&name), random_dense(&mut rng, &dims)));
                }
            }
        }
        let folder = Folder {
            dir,
            tensors,
            expected,
        };
        folder.write();
        folder
    }

    pub(crate) fn write(&self) {
        let path = self.dir.path().join("model.safetensors");
        write_tensors(&path, &self.tensors, &BTreeMap::new()).unwrap();
    }

    pub(crate) fn open(&self) -> Checkpoint {
        Checkpoint::open(self.dir.path()).unwrap()
    }

    /// Opens the folder and compares every weight with its numbers.
    #[track_caller]
    pub(crate) fn check(&self, format: &str, scheme: &str) {
        let opened = self.open();
        assert_eq!(opened.store().format(), format);
        nq::verify(&opened).unwrap();
        for (name, n) in &self.expected {
            let (store, dims) = (opened.store(), Dims::new(n.rows, n.cols));
            let weight = store.matrix(name, dims).unwrap();
            assert_eq!(store.exactness(name), Exactness::Exact, "{name}");
            if !scheme.is_empty() {
                assert_eq!(weight.scheme_name(), scheme, "{name}");
            }
            let in_levels = store.matrix_in_levels(name, dims).unwrap();
            let read = [
                (weight, store.scheme(name)),
                (in_levels, store.scheme_in_levels(name)),
            ];
            for (weight, told) in read {
                let scheme = match &weight {
                    Weight::Quantized(q) => Some(q.scheme()),
                    Weight::Dense(_) => None,
                };
                assert_eq!(told, scheme, "{name}");
                assert_eq!(store.is_float(name), scheme.is_none(), "{name}");
                let mut row = vec![0.0; n.cols];
                for o in 0..n.rows {
                    weight.dequantize_row(o, &mut row).unwrap();
                    let want: Vec<f32> = (0..n.cols).map(|i| n.value(o, i)).collect();
                    assert_eq!(row, want, "{name}, row {o}");
                }
            }
        }
    }

    /// Replaces one tensor and expects an error that names all of `parts`.
    #[track_caller]
    pub(crate) fn refuses(mut self, name: &str, tensor: Option<Tensor>, parts: &[&str]) {
        self.tensors.retain(|(n, _)| n != name);
        match tensor {
            Some(t) => self.replace(name, t),
            None => self.write(),
        }
        names(
            Checkpoint::open(self.dir.path()).and_then(|c| nq::verify(&c)),
            parts,
        );
    }

    /// Writes the folder with another tensor under this name.
    pub(crate) fn replace(&mut self, name: &str, tensor: Tensor) {
        self.tensors.retain(|(n, _)| n != name);
        self.tensors.push((name.into(), tensor));
        self.write();
    }
}
