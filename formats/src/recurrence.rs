//! Reads what a config.json says of a hybrid's recurrences.

use crate::error::Result;
use crate::keys::{TILED, VALUE_HEADS};
use crate::object::Object;
use nq_model::{Architecture, Delta, OutputGate};

/// More heads of a recurrence, wider ones or a longer convolution than this are rejected.
const MAX_HEADS: usize = 1 << 12;

impl Object<'_> {
    /// The recurrences of a model of `layers` layers.
    pub(crate) fn delta(
        &self,
        architecture: &Architecture,
        layers: usize,
    ) -> Result<Option<Delta>> {
        if !architecture.has_delta() {
            return Ok(None);
        }
        let bounded = |key: &str| match self.dim(key)? {
            n if n > MAX_HEADS => Err(self.bad(key, format!("at most {MAX_HEADS}"), n.to_string())),
            n => Ok(n),
        };
        let (heads, key_heads) = ("linear_num_value_heads", bounded("linear_num_key_heads")?);
        let value_heads = bounded(heads)?;
        if !value_heads.is_multiple_of(key_heads) {
            let expected = format!("a multiple of linear_num_key_heads ({key_heads})");
            return Err(self.bad(heads, expected, value_heads.to_string()));
        }
        let tiled = match self.str(VALUE_HEADS)?.as_deref() {
            None => false,
            Some(TILED) => true,
            Some(other) => {
                let expected = format!("{TILED}, or no such key");
                return Err(self.bad(VALUE_HEADS, expected, other.into()));
            }
        };
        Ok(Some(Delta {
            key_heads,
            value_heads,
            key_dim: bounded("linear_key_head_dim")?,
            value_dim: bounded("linear_value_head_dim")?,
            conv: bounded("linear_conv_kernel_dim")?,
            interval: self.interval(architecture, layers)?,
            tiled,
            gate: self.output_gate(architecture)?,
        }))
    }

    /// What the output of recurrences is multiplied by.
    fn output_gate(&self, architecture: &Architecture) -> Result<OutputGate> {
        const KEY: &str = "output_gate_type";
        match self.str(KEY)?.as_deref() {
            None | Some("silu" | "swish") => Ok(OutputGate::Silu),
            Some("sigmoid") if architecture.sigmoid_gates => Ok(OutputGate::Sigmoid),
            Some(other) => {
                let sigmoid = if architecture.sigmoid_gates {
                    " or sigmoid"
                } else {
                    ""
                };
                let why = format!(
                    "nq gates the output of recurrences of {} by silu{sigmoid}",
                    architecture.family
                );
                Err(self.unsupported(format!("{KEY} {other}"), &why))
            }
        }
    }

    /// Every how many layers one has attention, of `layers`: `full_attention_interval`, or what
    /// `layer_types` lists.
    fn interval(&self, architecture: &Architecture, layers: usize) -> Result<usize> {
        const INTERVAL: &str = "full_attention_interval";
        let given = match self.get(INTERVAL) {
            None => None,
            Some(_) => Some(self.dim(INTERVAL)?),
        };
        let types = self.strings("layer_types")?;
        if types.is_empty() {
            return Ok(given.unwrap_or(4));
        }
        // As transformers saves configurations of models whose attention has an indexer.
        let indexed = architecture.kinds.iter().any(|k| k.indexer().is_some());
        let full = |t: &String| t == "full_attention" || indexed && t == "indexed_attention";
        if types.len() != layers {
            let expected = format!("{layers} layers, as num_hidden_layers says");
            return Err(self.bad("layer_types", expected, types.len().to_string()));
        }
        if let Some(other) = types.iter().find(|t| !full(t) && *t != "linear_attention") {
            let why = "nq runs linear_attention and full_attention";
            return Err(self.unsupported(format!("a layer of type {other}"), why));
        }
        // Without any, the first would come behind the last layer.
        let listed = types.iter().position(full).unwrap_or(layers) + 1;
        let interval = given.unwrap_or(listed);
        let irregular = |(i, t): (usize, &String)| full(t) != (i + 1).is_multiple_of(interval);
        match types.iter().enumerate().find(|&(i, t)| irregular((i, t))) {
            None => Ok(interval),
            Some((i, t)) => {
                let what = format!("layer_types with {t} at layer {i}");
                let why = format!("nq runs one layer of attention in every {interval}");
                Err(self.unsupported(what, &why))
            }
        }
    }
}
