//! Adapters of every family beside the weights of a model: the same sums as merged, from each kind of file.

use crate::adapters::{
    FAMILIES, Pair, RANK, Tensors, config, describe, gguf, lora, model, pairs, peft, random, with,
    write,
};
use crate::common::{Rng, names};
use nq_formats::adapter::{Adapter, Lora, LoraRows};
use nq_formats::{Checkpoint, Error, Weight};
use nq_model::names::{EMBEDDING, HEAD};
use nq_model::{DType, Dims};
use serde_json::json;
use std::path::Path;

fn beside(model: &Path, adapter: &Path) -> Result<Lora, Error> {
    let base = Checkpoint::open(model).unwrap();
    Adapter::open(adapter, 1.0)?.lora(base.config())
}

fn values(weight: &Weight) -> Vec<f32> {
    let Weight::Dense(tensor) = weight else {
        panic!("{}", weight.scheme_name())
    };
    tensor.to_f32().unwrap()
}

#[test]
fn products_beside_a_weight_are_what_a_merge_adds() {
    for family in FAMILIES {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let c = config(family);
        let all = model(&at("m"), &c);
        let (pairs, after) = pairs(&all, |n| {
            n.contains("layers.") && !n.contains("mlp.experts.")
        });
        with(&at("m"), &at("merged"), &after);
        peft(&at("peft"), &pairs, json!({}));
        lora(&at("lora.gguf"), &c, &pairs);
        let (base, merged) = (gguf(&at("m")), gguf(&at("merged")));
        for (model, merged) in [(at("m"), at("merged")), (base, merged)] {
            let (base, merged) = (
                Checkpoint::open(&model).unwrap(),
                Checkpoint::open(&merged).unwrap(),
            );
            let c = base.config();
            for adapter in ["peft", "lora.gguf"] {
                let lora = beside(&model, &at(adapter)).unwrap();
                let mut found = 0;
                for layer in 0..c.num_hidden_layers {
                    let spec = c.layer(layer);
                    for product in spec.products().into_iter().chain(spec.kept_products()) {
                        let Some(sum) = lora.product(c, layer, product).unwrap() else {
                            continue;
                        };
                        let (a, Dims { rows: ranks, cols }) = (values(&sum.a), sum.a.dims());
                        assert!(ranks >= RANK * product.linears.len());
                        for (linear, own) in product.linears.iter().zip(&sum.b) {
                            let LoraRows { b, first } = own;
                            let (a, rank) = (&a[first * cols..], b.dims().cols);
                            if rank == 0 {
                                continue;
                            }
                            assert!(first + rank <= ranks);
                            found += 1;
                            let (name, dims) = (linear.name(layer), linear.dims(c));
                            assert_eq!((b.dims(), cols), (Dims::new(dims.rows, rank), dims.cols));
                            let weight =
                                |c: &Checkpoint| values(&c.store().matrix(&name, dims).unwrap());
                            let (w, expected, b) = (weight(&base), weight(&merged), values(b));
                            let most = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
                            for (i, expected) in expected.iter().enumerate() {
                                let (row, col) = (i / cols, i % cols);
                                let term = |k: usize| b[row * rank + k] * a[k * cols + col];
                                let sum = w[i] + (0..rank).map(term).sum::<f32>();
                                let off = (sum - expected).abs();
                                assert!(off <= 2e-6 * most, "{family}, {adapter}, {name}: {off}");
                            }
                        }
                    }
                }
                // Qwen3-Next's folders have two Linears in one.
                let fused = |n: &&String| n.ends_with("in_proj_qkvz") || n.ends_with("in_proj_ba");
                let expected = pairs.len() + pairs.keys().filter(fused).count();
                assert_eq!(found, expected, "{family}, {adapter}");
            }
        }
    }
}

#[test]
fn values_keep_the_narrowest_type_that_holds_them() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let c = config("qwen3-8b");
    let all = model(&at("m"), &c);
    let (pairs, _) = pairs(&all, |n| n.ends_with("1.mlp.down_proj"));
    let down = c
        .layer(1)
        .products()
        .into_iter()
        .find(|p| p.linears[0].suffix == "mlp.down_proj");
    for (name, factor, expected) in [
        ("bf16", 128.0, DType::BF16),
        ("f16", 1024.0, DType::F16),
        ("f32", 1e6, DType::F32),
    ] {
        // Whole numbers of up to 7, 10 and 20 bits.
        let rounded = |t: &nq_formats::Tensor| {
            let all = t
                .to_f32()
                .unwrap()
                .into_iter()
                .map(|v| (v / 0.3 * factor).round());
            nq_formats::Tensor::from_f32(t.shape().into(), all.collect()).unwrap()
        };
        let whole = pairs.iter().map(|(n, p)| {
            let (a, b) = (rounded(&p.a), rounded(&p.b));
            (n.clone(), Pair { a, b })
        });
        peft(&at(name), &whole.collect(), json!({}));
        let lora = beside(&at("m"), &at(name)).unwrap();
        let sum = lora.product(&c, 1, down.unwrap()).unwrap().unwrap();
        for weight in [&sum.a, &sum.b[0].b] {
            let Weight::Dense(t) = weight else { panic!() };
            assert_eq!(t.dtype(), expected, "{name}");
        }
        assert!(lora.product(&c, 0, down.unwrap()).unwrap().is_none());
    }
}

#[test]
fn what_can_only_be_merged_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let all = model(&at("m"), &config("qwen3-30b-a3b"));
    for name in [HEAD, EMBEDDING, "model.layers.1.mlp.experts.2.up_proj"] {
        let (pairs, _) = pairs(&all, |n| n == name);
        let _ = std::fs::remove_dir_all(at("adapter"));
        peft(&at("adapter"), &pairs, json!({}));
        let told = name.replace("2.up_proj", "up_proj");
        names(
            beside(&at("m"), &at("adapter")),
            &[&told, "merge it into the unquantized model"],
        );
    }
    let mut rng = Rng(2);
    let tensors: Tensors = [("lm_head.weight", [300, 32])]
        .map(|(name, shape)| (format!("base_model.model.{name}"), random(&mut rng, &shape)))
        .into();
    describe(&at("whole"), json!({ "modules_to_save": ["lm_head"] }));
    write(&at("whole").join("adapter_model.safetensors"), &tensors);
    let parts = ["lm_head in place of the model's", "merge it"];
    names(beside(&at("m"), &at("whole")), &parts);
    let (pairs, _) = pairs(&all, |n| n.ends_with("o_proj"));
    let mut tensors = Tensors::new();
    for (name, pair) in &pairs {
        let full = |part: &str| format!("base_model.model.{name}.{part}");
        tensors.insert(full("lora_A.weight"), pair.a.clone());
        tensors.insert(full("lora_B.weight"), pair.b.clone());
        let lengths = random(&mut rng, &[pair.b.shape()[0]]);
        tensors.insert(full("lora_magnitude_vector.weight"), lengths);
    }
    describe(&at("dora"), json!({ "use_dora": true }));
    write(&at("dora").join("adapter_model.safetensors"), &tensors);
    names(
        beside(&at("m"), &at("dora")),
        &["a DoRA adapter", "merge it"],
    );
}
