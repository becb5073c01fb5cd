//! Reads the rotary embedding of a config.json as transformers does: from `rope_scaling` if there is one,
//! otherwise from `rope_parameters` of transformers 5, otherwise from `rope_theta` alone.

use crate::error::Result;
use crate::object::{MAX_DIM, Object};
use nq_model::{Rope, RopeScaling};
use serde_json::Value;

/// What one of the two objects says.
#[derive(Clone, Copy, Default)]
struct OneRope {
    theta: Option<f64>,
    scaling: RopeScaling,
    /// Values of a head that are rotated.
    dims: Option<usize>,
    sections: Option<[usize; 3]>,
}

impl Object<'_> {
    /// The rotary embedding of heads of `head_dim` values, which are rotated in the first of `parts` parts if no
    /// key says otherwise.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`], naming it, for a kind or a key that nq does not compute;
    /// [`crate::Error::Malformed`] for missing, mistyped or contradictory keys.
    pub(crate) fn rope(&self, head_dim: usize, parts: usize) -> Result<Rope> {
        let beside = self.f64("rope_theta")?;
        let beside_part = self.rotary_dims(head_dim)?;
        let one = |key| self.object(key, |o| o.one_rope(self, beside, head_dim));
        let (parameters, scaling) = (one("rope_parameters")?, one("rope_scaling")?);
        let theta = |rope: &Option<OneRope>| rope.and_then(|r| r.theta);
        let given = match &scaling {
            // As transformers reads it, rope_parameters then counts for nothing, its base neither.
            Some(OneRope { theta: None, .. })
                if beside.is_none() && theta(&parameters).is_some() =>
            {
                let expected =
                    "a base in rope_scaling or next to it, as it replaces rope_parameters";
                return Err(self.bad("rope_theta", expected.into(), "none there".into()));
            }
            Some(rope) => rope.theta,
            None => theta(&parameters),
        };
        let theta = given.or(beside);
        let theta =
            theta.ok_or_else(|| self.bad("rope_theta", "a number".into(), "no such key".into()))?;
        if !(theta.is_finite() && theta > 0.0) {
            return Err(self.bad("rope_theta", "a positive number".into(), theta.to_string()));
        }
        let rope = scaling.or(parameters).unwrap_or_default();
        let dims = rope.dims.or(beside_part).unwrap_or(head_dim / parts);
        let even = Rope {
            theta,
            dims: Some(dims).filter(|&d| d != head_dim),
            scaling: rope.scaling,
            sections: None,
        };
        let thirds = even.sections(dims / 2);
        Ok(Rope {
            sections: rope.sections.filter(|said| *said != thirds),
            ..even
        })
    }

    /// The rotary embedding of heads that must be rotated whole.
    ///
    /// # Errors
    /// Errors of [`Object::rope`]; [`crate::Error::Unsupported`] for others.
    pub(crate) fn whole_rope(&self, head_dim: usize) -> Result<Rope> {
        let rope = self.rope(head_dim, 1)?;
        match rope.dims {
            None => Ok(rope),
            Some(dims) => {
                let part = dims as f64 / head_dim as f64;
                let what = format!("partial_rotary_factor {part}");
                Err(self.unsupported(what, "nq rotates whole heads in this architecture"))
            }
        }
    }

    /// The number of values of a head that `partial_rotary_factor` says are rotated.
    fn rotary_dims(&self, head_dim: usize) -> Result<Option<usize>> {
        const KEY: &str = "partial_rotary_factor";
        let Some(part) = self.f64(KEY)? else {
            return Ok(None);
        };
        // A part that was computed from a number of values gives that number again.
        let product = head_dim as f64 * part;
        let dims = match product.round() {
            whole if (product - whole).abs() < 1e-6 => whole,
            _ => product,
        };
        if !(part > 0.0 && part <= 1.0 && dims >= 2.0 && dims % 2.0 == 0.0) {
            let expected = format!("an even number of the {head_dim} values of a head");
            return Err(self.bad(KEY, expected, part.to_string()));
        }
        Ok(Some(dims as usize))
    }

    /// One of the two objects.
    fn one_rope(
        &self,
        config: &Object<'_>,
        beside: Option<f64>,
        head_dim: usize,
    ) -> Result<OneRope> {
        let theta = self.f64("rope_theta")?;
        let kind = self.str("rope_type")?;
        let kind = kind.or(self.str("type")?);
        let scaling = match kind.as_deref() {
            None | Some("default") => RopeScaling::None,
            Some("yarn") => self.yarn(config)?,
            Some("llama3") => self.llama3()?,
            Some(other) => {
                return Err(self.unsupported(
                    format!("rope_scaling of type {other}"),
                    "nq implements none, yarn and llama3",
                ));
            }
        };
        // YaRN takes a logarithm of the base.
        match theta
            .or(beside)
            .filter(|t| scaling != RopeScaling::None && *t <= 1.0)
        {
            None => Ok(OneRope {
                theta,
                scaling,
                dims: self.rotary_dims(head_dim)?,
                sections: self.sections()?,
            }),
            Some(base) => Err(self.bad("rope_theta", "more than 1".into(), base.to_string())),
        }
    }

    /// The frequencies of a position's coordinates.
    fn sections(&self) -> Result<Option<[usize; 3]>> {
        let read = |v: &Value| -> Option<[usize; 3]> {
            let sections = v.as_array()?.iter().map(Value::as_u64);
            let bounded = sections.map(|n| n.filter(|n| *n <= MAX_DIM).map(|n| n as usize));
            bounded.collect::<Option<Vec<usize>>>()?.try_into().ok()
        };
        self.typed("mrope_section", "three numbers", read)
    }

    fn llama3(&self) -> Result<RopeScaling> {
        let positive = |key: &str| match self.f64(key)? {
            Some(v) if v.is_finite() && v > 0.0 => Ok(v),
            v => {
                let found = v.map_or("no such key".into(), |v| v.to_string());
                let key = format!("rope_scaling.{key}");
                Err(self.bad(&key, "a positive number".into(), found))
            }
        };
        let (low, high) = (positive("low_freq_factor")?, positive("high_freq_factor")?);
        if low >= high {
            let expected = format!("above low_freq_factor ({low})");
            return Err(self.bad("rope_scaling.high_freq_factor", expected, high.to_string()));
        }
        Ok(RopeScaling::Llama3 {
            factor: positive("factor")?,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: self.dim("original_max_position_embeddings")?,
        })
    }

    fn yarn(&self, config: &Object<'_>) -> Result<RopeScaling> {
        const ORIGINAL: &str = "original_max_position_embeddings";
        let length = |object: &Object<'_>, key: &str| match object.u64(key)? {
            Some(n) if !(1..=MAX_DIM).contains(&n) => Err(object.bad(
                &format!("rope_scaling.{key}"),
                format!("1 to {MAX_DIM}"),
                n.to_string(),
            )),
            n => Ok(n.map(|n| n as usize)),
        };
        let longest = config.dim("max_position_embeddings")?;
        let original = match (length(self, ORIGINAL)?, length(config, ORIGINAL)?) {
            (Some(own), Some(beside)) if own != beside => {
                return Err(config.bad(ORIGINAL, own.to_string(), beside.to_string()));
            }
            (own, beside) => own.or(beside).unwrap_or(longest),
        };
        let factor = self.f64("factor")?;
        let factor = factor.unwrap_or(longest as f64 / original as f64);
        if !(factor.is_finite() && factor >= 1.0) {
            return Err(self.bad(
                "rope_scaling.factor",
                "at least 1".into(),
                factor.to_string(),
            ));
        }
        let positive = |key: &str| -> Result<Option<f64>> {
            match self.f64(key)? {
                Some(v) if !(v.is_finite() && v >= 0.0) => {
                    let key = format!("rope_scaling.{key}");
                    Err(self.bad(&key, "0 or more".into(), v.to_string()))
                }
                v => Ok(v),
            }
        };
        // 0 counts as absent where transformers reads it so.
        let or = |key: &str, otherwise: f64| {
            Ok(positive(key)?.filter(|v| *v != 0.0).unwrap_or(otherwise))
        };
        let (beta_fast, beta_slow) = (or("beta_fast", 32.0)?, or("beta_slow", 1.0)?);
        let mscale = |m: f64| 0.1 * m * factor.ln() + 1.0;
        let usual = match (or("mscale", 0.0)?, or("mscale_all_dim", 0.0)?) {
            (m, all) if m > 0.0 && all > 0.0 => mscale(m) / mscale(all),
            _ => mscale(1.0),
        };
        let attention_factor = positive("attention_factor")?.unwrap_or(usual);
        let multiplier = positive("attn_factor")?.unwrap_or(1.0);
        Ok(RopeScaling::Yarn {
            factor,
            original_max_position_embeddings: original,
            beta_fast,
            beta_slow,
            truncate: self.bool("truncate")?.unwrap_or(true),
            attention_factor: attention_factor * multiplier,
        })
    }
}
