//! How kernels are launched.

use super::info::GpuInfo;
use super::info::Version;
use cudarc::driver::sys;

/// Launch configuration of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchShape {
    pub(super) grid: (usize, usize, usize),
    pub(super) threads: usize,
    pub(super) shared: usize,
    pub(super) overlap: bool,
    pub(super) cluster: usize,
}

impl LaunchShape {
    /// `x` by `y` by `z` blocks of `threads` threads, which start when the previous kernel has ended.
    pub(crate) fn new([x, y, z]: [usize; 3], threads: usize) -> Self {
        LaunchShape {
            grid: (x, y, z),
            threads,
            shared: 0,
            overlap: false,
            cluster: 1,
        }
    }

    /// Sets the bytes of dynamic shared memory.
    pub(crate) fn shared(self, shared: usize) -> Self {
        LaunchShape { shared, ..self }
    }

    /// Allows the kernel to start before the previous one has ended.
    pub(crate) fn overlapping(self) -> Self {
        LaunchShape {
            overlap: true,
            ..self
        }
    }

    /// Launches in clusters of this many consecutive blocks along x.
    pub(crate) fn clusters_of(self, cluster: usize) -> Self {
        LaunchShape { cluster, ..self }
    }
}

/// The oldest driver whose graphs have edges of kernels that overlap (CUDA 12.3).
const RECORDS_OVERLAP: i32 = 12_030;

/// Attributes of a launch besides its sizes.
pub(super) struct Attributes {
    all: [sys::CUlaunchAttribute; 2],
    count: usize,
}

impl Attributes {
    pub(super) fn of(shape: LaunchShape, info: &GpuInfo) -> Self {
        use sys::CUlaunchAttributeID_enum as Id;
        // SAFETY: structures of integers and unions of them; all zero is valid.
        let all: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
        let mut attributes = Attributes { all, count: 0 };
        if shape.overlap && info.capability >= Version::new(9, 0) && info.driver >= RECORDS_OVERLAP
        {
            let to = attributes.next(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
            to.programmaticStreamSerializationAllowed = 1;
        }
        if shape.cluster > 1 {
            let to = attributes.next(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
            to.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
                x: shape.cluster as u32,
                y: 1,
                z: 1,
            };
        }
        attributes
    }

    /// Adds an attribute and returns its value for setting.
    fn next(&mut self, id: sys::CUlaunchAttributeID) -> &mut sys::CUlaunchAttributeValue {
        let attribute = &mut self.all[self.count];
        self.count += 1;
        attribute.id = id;
        &mut attribute.value
    }

    /// A launch configuration with these attributes, to which it points.
    pub(super) fn config(
        &mut self,
        shape: LaunchShape,
        stream: sys::CUstream,
    ) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: shape.grid.0 as u32,
            gridDimY: shape.grid.1 as u32,
            gridDimZ: shape.grid.2 as u32,
            blockDimX: shape.threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared as u32,
            hStream: stream,
            attrs: self.all.as_mut_ptr(),
            numAttrs: self.count as u32,
        }
    }
}
