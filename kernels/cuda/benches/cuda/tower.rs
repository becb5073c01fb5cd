//! The kernels of the 27-layer tower of Qwen3.5 beside its products.

use super::timing::Timing;
use nq_cuda::{ImageGrid, ImageHeads, LayerNorm};
use nq_kernels::Result;
use nq_model::vision::Grid;

/// Images of 1,024 and 2,048 pixels a side.
pub(crate) fn tower(t: &mut Timing) -> Result<()> {
    let (hidden, intermediate) = (1152, 4304);
    let heads = ImageHeads { count: 16, dim: 72 };
    for side in [64, 128] {
        let grid = Grid {
            t: 1,
            h: side,
            w: side,
        };
        let (m, image) = (grid.patches(), ImageGrid { grid, merge: 2 });
        let f32s = |n: usize| t.gpu.filled("a benchmark", n, 0.1f32);
        let (mut x, qkv, mlp) = (
            f32s(m * hidden)?,
            f32s(m * 3 * hidden)?,
            f32s(m * intermediate)?,
        );
        let (bias, biases, wide) = (f32s(hidden)?, f32s(3 * hidden)?, f32s(intermediate)?);
        let table = f32s(48 * 48 * hidden)?;
        let turns = t.gpu.filled("a benchmark", side * 18, [0.8f32, 0.6])?;
        let mut values = t.gpu.zeros("a benchmark", heads.values(m))?;
        let mut half = t.gpu.zeros("a benchmark", m * 4352)?;
        let name = |op: &str| format!("{op} {m} patches");
        t.alone(&name("tower_positions"), 12 * m * hidden, |_| {
            t.stream.tower_positions(&mut x, &bias, &table, image)
        })?;
        t.alone(&name("tower_norm"), 10 * m * hidden, |_| {
            let norm = LayerNorm {
                gain: &bias,
                bias: &bias,
                eps: 1e-6,
            };
            t.stream
                .tower_norm(&mut x, Some(&bias), &norm, &mut half, m, 1)
        })?;
        t.alone(
            &name("tower_heads"),
            3 * m * (4 * hidden + 2 * 1280),
            |_| (t.stream).tower_heads(&qkv, &biases, &turns, &mut values, heads, image),
        )?;
        t.alone(&name("tower_attention"), 8 * m * 1280, |_| {
            (t.stream).tower_attention(&values, &mut half, heads, m, 0..m)
        })?;
        t.alone(&name("tower_gelu"), 6 * m * intermediate, |_| {
            t.stream.tower_gelu(&mlp, &wide, &mut half, m, false)
        })?;
    }
    Ok(())
}
