//! Plans of models whose residual has several streams.

use super::spec;
use crate::engine::plan::{placed, planned};
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_kernels::pages::KvType;
use nq_kernels::registry::WeightKind;
use nq_model::names::is_kept;
use nq_model::{DType, ModelConfig, Preset};

/// The published shape, with 4 bits for all that is quantized: its table stays on the host, and its experts, which have no
/// room anywhere else, are refused where there is too little memory.
#[test]
fn the_published_shape_is_planned_on_one_gpu() {
    let config = Preset::find("qwen3.8-flash-next").unwrap().config();
    let scheme = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
    let kinds = |name: &str| match is_kept(name) {
        true => WeightKind::Dense(DType::BF16),
        false => WeightKind::in_scheme(scheme.into(), false),
    };
    let plan = |c: &ModelConfig, kv| planned(c, &kinds, &spec(32_768, kv));
    let whole = plan(&config, KvType::F16).unwrap();
    let weights = whole.weights as f64 / 1e9;
    assert!((70.0..85.0).contains(&weights), "{weights}");
    let without = ModelConfig {
        ngrams: None,
        ..config.clone()
    };
    let without = plan(&without, KvType::F16).unwrap();
    // The products behind the table, and what sequences keep of it, but not the table.
    let of_table = whole.total() - without.total();
    assert!((60 << 20..160 << 20).contains(&of_table), "{of_table}");
    let refused = plan(&config, KvType::Int8).unwrap_err().to_string();
    assert!(refused.contains("indexer"), "{refused}");
    let place = |free| placed(&config, &kinds, &spec(4096, KvType::F16), &[free], 1 << 38);
    assert_eq!(place(100 << 30).unwrap().host_bytes, 0);
    assert!(place(60 << 30).is_err());
}
