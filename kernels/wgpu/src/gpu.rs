//! An open adapter: buffers, kernels, and what goes wrong.

use crate::adapter::{self, ready};
use crate::source::KernelSource;
use crate::timer::Timer;
use nq_formats::human_bytes;
use nq_kernels::profile::{Key, Profile};
use nq_runtime::{Error, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use wgpu::{
    BindGroup, BindGroupLayout, Buffer, BufferUsages, CommandBuffer, CommandEncoder, ComputePass,
    ComputePipeline, DeviceDescriptor, ErrorFilter, Features, Limits, MemoryHints, PollType,
    QuerySet,
};

/// What a kernel does with a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Binding {
    /// Reads sizes of a few bytes.
    Uniform,
    /// Reads it.
    Read,
    /// Reads and writes it.
    Write,
}

/// A compiled kernel.
pub(crate) struct Kernel(ComputePipeline);

/// A kernel, and the buffers that it is bound to.
pub(crate) struct BoundKernel {
    kernel: Arc<Kernel>,
    bound: BindGroup,
}

impl BoundKernel {
    /// Adds a launch to `pass`.
    pub(crate) fn launch(&self, pass: &mut LaunchPass<'_>, grid: Grid) {
        pass.launch(&self.kernel, &self.bound, grid);
    }
}

/// Workgroups of a launch.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Grid {
    pub(crate) x: usize,
    pub(crate) y: usize,
    pub(crate) z: usize,
}

impl Grid {
    pub(crate) fn new(x: usize, y: usize) -> Self {
        Grid { x, y, z: 1 }
    }
}

/// Workgroups in a row of a grid that would have too many of them.
pub(crate) const GRID: usize = 32768;

/// An adapter, opened.
pub(crate) struct Gpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
    pub(crate) limits: Limits,
    /// `wgpu:0`
    name: String,
    pub(crate) description: String,
    /// Lanes of a subgroup, if kernels sum over them.
    pub(crate) lanes: Option<usize>,
    /// True if operations can be timed.
    pub(crate) times: bool,
    pub(crate) profile: Profile,
    /// True if its memory is the computer's.
    pub(crate) on_host: bool,
    /// The first error that no scope has caught, or why the device is lost.
    failed: Arc<Mutex<Option<String>>>,
    kernels: Mutex<HashMap<String, Arc<Kernel>>>,
    layouts: Mutex<HashMap<Vec<Binding>, BindGroupLayout>>,
}

/// Bytes that are uploaded at once.
pub(crate) const UPLOAD: usize = 32 << 20;

impl Gpu {
    /// Opens the adapter of number `ordinal`.
    ///
    /// # Errors
    /// [`Error::Device`] if it is absent or its driver refuses.
    pub(crate) fn open(ordinal: usize) -> Result<Self> {
        let adapter = adapter::adapter(ordinal)?;
        let name = format!("wgpu:{ordinal}");
        let lanes = adapter::subgroup_lanes(&adapter);
        let limits = adapter.limits();
        let timestamps = Features::TIMESTAMP_QUERY | Features::TIMESTAMP_QUERY_INSIDE_PASSES;
        let times = adapter.features().contains(timestamps);
        let mut features = Features::empty();
        features.set(Features::SUBGROUP, lanes.is_some());
        features.set(timestamps, times);
        let descriptor = DeviceDescriptor {
            label: Some("nq"),
            required_features: features,
            required_limits: limits.clone(),
            memory_hints: MemoryHints::MemoryUsage,
            ..DeviceDescriptor::default()
        };
        let opened = ready(adapter.request_device(&descriptor));
        let (device, queue) = opened.map_err(|e| Error::Device {
            device: name.clone(),
            why: e.to_string(),
        })?;
        let failed = Arc::new(Mutex::new(None));
        let first = |failed: &Mutex<Option<String>>, why: String| {
            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
            failed.get_or_insert(why);
        };
        let note = Arc::clone(&failed);
        device.on_uncaptured_error(Arc::new(move |e: wgpu::Error| first(&note, e.to_string())));
        let note = Arc::clone(&failed);
        device.set_device_lost_callback(move |reason, why| {
            first(&note, format!("the device is lost ({reason:?}): {why}"));
        });
        let info = adapter.get_info();
        Ok(Gpu {
            description: format!("{name} ({}, {:?})", info.name, info.backend),
            on_host: info.device_type != wgpu::DeviceType::DiscreteGpu,
            device,
            queue,
            limits,
            name,
            lanes,
            times,
            profile: Profile::default(),
            failed,
            kernels: Mutex::default(),
            layouts: Mutex::default(),
        })
    }

    /// Most bytes of a buffer that a kernel can be bound to.
    pub(crate) fn most_bytes(&self) -> usize {
        let bound = self.limits.max_storage_buffer_binding_size;
        bound.min(self.limits.max_buffer_size) as usize
    }

    fn error(&self, why: String) -> Error {
        Error::Device {
            device: self.name.clone(),
            why,
        }
    }

    /// An error of the driver since the last call, if there was one.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(crate) fn check(&self) -> Result<()> {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed
            .as_ref()
            .map_or(Ok(()), |why| Err(self.error(why.clone())))
    }

    /// Runs `work`, whose errors of the driver become one that begins with `what`.
    fn scoped<T>(&self, what: &str, work: impl FnOnce() -> T) -> Result<T> {
        let memory = self.device.push_error_scope(ErrorFilter::OutOfMemory);
        let internal = self.device.push_error_scope(ErrorFilter::Internal);
        let invalid = self.device.push_error_scope(ErrorFilter::Validation);
        let made = work();
        let errors = [
            ready(invalid.pop()),
            ready(internal.pop()),
            ready(memory.pop()),
        ];
        match errors.into_iter().flatten().next() {
            None => self.check().map(|()| made),
            Some(wgpu::Error::OutOfMemory { .. }) => {
                Err(self.error(format!("{what}: the device is out of memory")))
            }
            Some(e) => Err(self.error(format!("{what}: {e}"))),
        }
    }

    /// A buffer of `bytes` bytes, zeros, for kernels.
    ///
    /// # Errors
    /// [`Error::Device`] if a binding cannot be as large, or if memory is short.
    pub(crate) fn buffer(&self, what: &str, bytes: usize) -> Result<Buffer> {
        let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST | BufferUsages::COPY_SRC;
        self.allocate(what, bytes, usage)
    }

    fn allocate(&self, what: &str, bytes: usize, usage: BufferUsages) -> Result<Buffer> {
        let size = bytes.max(16).next_multiple_of(16);
        let most = self.most_bytes();
        if size > most {
            let (size, most) = (human_bytes(size as u64), human_bytes(most as u64));
            let why =
                format!("{what} needs {size} in one buffer; the adapter binds {most} at most");
            return Err(self.error(why));
        }
        let what = format!("{what} of {}", human_bytes(size as u64));
        self.scoped(&what, || {
            self.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(&what),
                size: size as u64,
                usage,
                mapped_at_creation: false,
            })
        })
    }

    /// Bytes that can still be allocated: as much as the driver gives in buffers of up to 1 GB, which are freed again.
    /// No interface of `wgpu` tells.
    pub(crate) fn free_memory(&self) -> usize {
        const MOST: usize = 1 << 30;
        let (mut held, mut size, mut free) = (Vec::new(), self.most_bytes().min(MOST), 0);
        while size >= 1 << 24 {
            match self.buffer("a measure of free memory", size) {
                Ok(buffer) => {
                    free += size;
                    held.push(buffer);
                }
                Err(_) => size /= 2,
            }
        }
        held.iter().for_each(Buffer::destroy);
        free
    }

    /// A buffer of these sizes, which kernels read as a uniform.
    pub(crate) fn uniform(&self, words: &[u32; 8]) -> Result<Buffer> {
        let usage = BufferUsages::UNIFORM | BufferUsages::COPY_DST;
        let buffer = self.allocate("sizes", 32, usage)?;
        self.write(&buffer, 0, bytemuck::cast_slice(words));
        Ok(buffer)
    }

    /// A buffer with these values.
    pub(crate) fn upload(&self, what: &str, values: &[f32]) -> Result<Buffer> {
        let buffer = self.buffer(what, 4 * values.len())?;
        self.write(&buffer, 0, bytemuck::cast_slice(values));
        Ok(buffer)
    }

    /// A buffer from which the host reads `bytes` bytes.
    pub(crate) fn staging(&self, bytes: usize) -> Result<Buffer> {
        let usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST;
        self.allocate("results", bytes, usage)
    }

    /// What times the operations of a pass, while they are profiled.
    ///
    /// # Errors
    /// [`Error::Device`] if memory is short.
    pub(crate) fn timer(&self) -> Result<Option<Timer>> {
        let on = self.profile.is_on();
        on.then(|| Timer::new(self)).transpose()
    }

    /// Places for `count` timestamps.
    pub(crate) fn timestamps(&self, count: u32) -> QuerySet {
        self.device.create_query_set(&wgpu::QuerySetDescriptor {
            label: None,
            ty: wgpu::QueryType::Timestamp,
            count,
        })
    }

    /// A buffer for `bytes` bytes of timestamps.
    ///
    /// # Errors
    /// [`Error::Device`] if memory is short.
    pub(crate) fn resolved(&self, bytes: usize) -> Result<Buffer> {
        let usage = BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC;
        self.allocate("timestamps", bytes, usage)
    }

    /// Nanoseconds of a timestamp's unit.
    pub(crate) fn timestamp_period(&self) -> f32 {
        self.queue.get_timestamp_period()
    }

    /// Writes `bytes` from byte `at` of a buffer on, before whatever is submitted next.
    pub(crate) fn write(&self, buffer: &Buffer, at: usize, bytes: &[u8]) {
        self.queue.write_buffer(buffer, at as u64, bytes);
    }

    /// Waits until everything written and submitted is done.
    ///
    /// # Errors
    /// [`Error::Device`] if the device failed or is lost.
    pub(crate) fn finish(&self) -> Result<()> {
        self.queue.submit([]);
        let waited = self.device.poll(PollType::wait_indefinitely());
        self.check()?;
        waited.map(drop).map_err(|e| self.error(e.to_string()))
    }

    /// The kernel of `source`, which is compiled the first time that it is asked for.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses it.
    pub(crate) fn kernel(&self, source: &KernelSource) -> Result<Arc<Kernel>> {
        let text = source.text();
        let bindings = bindings(&text);
        self.compiled(text, &bindings)
    }

    /// The kernel of `source`, bound to `buffers` in the order of their numbers.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses it.
    pub(crate) fn bound(&self, source: &KernelSource, buffers: &[&Buffer]) -> Result<BoundKernel> {
        let text = source.text();
        let bindings = bindings(&text);
        Ok(BoundKernel {
            bound: self.bind(&bindings, buffers)?,
            kernel: self.compiled(text, &bindings)?,
        })
    }

    fn compiled(&self, text: String, bindings: &[Binding]) -> Result<Arc<Kernel>> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(&text) {
            return Ok(Arc::clone(kernel));
        }
        let layout = self.layout(bindings);
        let pipeline = self.scoped("a kernel", || {
            let module = self
                .device
                .create_shader_module(wgpu::ShaderModuleDescriptor {
                    label: Some("nq"),
                    source: wgpu::ShaderSource::Wgsl(text.as_str().into()),
                });
            let pipeline_layout =
                self.device
                    .create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                        label: None,
                        bind_group_layouts: &[Some(&layout)],
                        immediate_size: 0,
                    });
            self.device
                .create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                    label: None,
                    layout: Some(&pipeline_layout),
                    module: &module,
                    entry_point: Some("main"),
                    compilation_options: wgpu::PipelineCompilationOptions {
                        // Kernels write what they read.
                        zero_initialize_workgroup_memory: false,
                        ..Default::default()
                    },
                    cache: None,
                })
        })?;
        let kernel = Arc::new(Kernel(pipeline));
        kernels.insert(text, Arc::clone(&kernel));
        Ok(kernel)
    }

    fn layout(&self, bindings: &[Binding]) -> BindGroupLayout {
        let mut layouts = self.layouts.lock().unwrap_or_else(PoisonError::into_inner);
        let make = || {
            let entries: Vec<_> = bindings.iter().zip(0..).map(entry).collect();
            self.device
                .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
                    label: None,
                    entries: &entries,
                })
        };
        layouts
            .entry(bindings.to_vec())
            .or_insert_with(make)
            .clone()
    }

    /// Binds `buffers` for kernels with such bindings.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses.
    pub(crate) fn bind(&self, bindings: &[Binding], buffers: &[&Buffer]) -> Result<BindGroup> {
        let layout = self.layout(bindings);
        let entries: Vec<_> = (buffers.iter().zip(0..))
            .map(|(buffer, binding)| wgpu::BindGroupEntry {
                binding,
                resource: buffer.as_entire_binding(),
            })
            .collect();
        self.scoped("bindings of a kernel", || {
            self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &layout,
                entries: &entries,
            })
        })
    }

    /// An empty list of commands.
    pub(crate) fn encoder(&self) -> CommandEncoder {
        self.device
            .create_command_encoder(&wgpu::CommandEncoderDescriptor::default())
    }

    /// Submits commands.
    pub(crate) fn submit(&self, encoder: CommandEncoder) {
        self.submit_finished(encoder.finish());
    }

    /// Submits commands that no more are added to.
    pub(crate) fn submit_finished(&self, commands: CommandBuffer) {
        self.queue.submit([commands]);
    }

    /// Waits for what was submitted, and appends the first `bytes` bytes of `staging`, as f32, to `out`.
    ///
    /// # Errors
    /// [`Error::Device`] if the device failed or is lost.
    pub(crate) fn read(&self, staging: &Buffer, bytes: usize, out: &mut Vec<f32>) -> Result<()> {
        let slice = staging.slice(..bytes as u64);
        let (send, receive) = std::sync::mpsc::channel();
        slice.map_async(wgpu::MapMode::Read, move |mapped| {
            // Nobody listens any more if this function has returned an error.
            let _ = send.send(mapped);
        });
        self.finish()?;
        let mapped = receive.recv().map_err(|e| self.error(e.to_string()))?;
        mapped.map_err(|e| self.error(format!("reading results: {e}")))?;
        let view = slice.get_mapped_range();
        let view = view.map_err(|e| self.error(format!("reading results: {e}")))?;
        match bytemuck::try_cast_slice(&view) {
            Ok(values) => out.extend_from_slice(values),
            Err(_) => out.extend(
                view.chunks_exact(4)
                    .map(bytemuck::pod_read_unaligned::<f32>),
            ),
        }
        drop(view);
        staging.unmap();
        Ok(())
    }
}

/// Launches on their way into a list of commands.
pub(crate) struct LaunchPass<'a> {
    pass: ComputePass<'a>,
    /// Times operations, if somebody wants that.
    timer: Option<&'a mut Timer>,
}

impl<'a> LaunchPass<'a> {
    /// An empty one at the end of `encoder`.
    pub(crate) fn new(encoder: &'a mut CommandEncoder, mut timer: Option<&'a mut Timer>) -> Self {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        if let Some(timer) = &mut timer {
            timer.begin(&mut pass);
        }
        LaunchPass { pass, timer }
    }

    /// Adds a launch of `kernel`.
    pub(crate) fn launch(&mut self, kernel: &Kernel, bound: &BindGroup, grid: Grid) {
        self.pass.set_pipeline(&kernel.0);
        self.pass.set_bind_group(0, bound, &[]);
        let Grid { x, y, z } = grid;
        self.pass.dispatch_workgroups(x as u32, y as u32, z as u32);
    }

    /// Counts what was launched since the last call as an operation that reads `bytes` bytes.
    pub(crate) fn ends(&mut self, op: Key, bytes: usize) {
        if let Some(timer) = &mut self.timer {
            timer.ends(&mut self.pass, op, bytes);
        }
    }
}

/// What a kernel does with its buffers, as its text declares them, in the order of their numbers.
fn bindings(text: &str) -> Vec<Binding> {
    let declared = text.lines().filter_map(|line| {
        let (number, declared) = line.strip_prefix("@group(0) @binding(")?.split_once(')')?;
        let kind = match declared
            .trim_start()
            .strip_prefix("var<")?
            .split_once('>')?
            .0
        {
            "uniform" => Binding::Uniform,
            "storage, read" => Binding::Read,
            _ => Binding::Write,
        };
        Some((number.parse::<usize>().ok()?, kind))
    });
    let mut declared: Vec<_> = declared.collect();
    declared.sort_by_key(|(number, _)| *number);
    declared.into_iter().map(|(_, kind)| kind).collect()
}

fn entry((binding, number): (&Binding, u32)) -> wgpu::BindGroupLayoutEntry {
    let ty = match binding {
        Binding::Uniform => wgpu::BufferBindingType::Uniform,
        Binding::Read => wgpu::BufferBindingType::Storage { read_only: true },
        Binding::Write => wgpu::BufferBindingType::Storage { read_only: false },
    };
    wgpu::BindGroupLayoutEntry {
        binding: number,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty,
            has_dynamic_offset: false,
            min_binding_size: None,
        },
        count: None,
    }
}
