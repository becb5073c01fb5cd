# Turns kernel sources into host C++: PTX is replaced by calls of an emulator.
import re,sys
d='kernels/cuda/'
def load(name,seen):
    if name in seen: return ''
    seen.add(name); out=[]
    for l in open(d+name):
        m=re.match(r'#include "(.*)"',l)
        if m: out.append(load(m[1],seen))
        elif l.startswith('#pragma once') or l.startswith('#include') or '#pragma unroll' in l: pass
        else: out.append(l)
    return ''.join(out)
seen=set()
src=''.join(load(n,seen) for n in ['gemv.cuh','gemv_batch.cuh','columns.cu','gemm.cuh','experts.cuh'])
src=re.sub(r'#define COLUMNS.*?\n.*?\n','',src); src=re.sub(r'^COLUMNS\(.*\)$','',src,flags=re.M)
# bodies of functions with PTX
def body(name,new):
    global src
    m=re.search(r'DEVICE [\w ]+ %s\([^{]*\{'%name,src)
    assert m,name
    i=m.end(); n=1
    while n: n+={'{':1,'}':-1}.get(src[i],0); i+=1
    src=src[:m.end()]+new+'}'+src[i:]
body('load_stream','return *(const uint4*)p;')
body('load_stream_8','return *(const uint2*)p;')
body('load_stream_4','return *(const uint32_t*)p;')
body('copy_async','memcpy(to, from, BYTES);')
body('copy_commit',''); body('copy_wait','')
body('release_successor',''); body('wait_for_predecessor','')
body('shared_address','return uint32_t((const char*)p - emu_shared);')
body('keep','return v;')
for n,t in [(16,'uint4'),(8,'uint2'),(4,'uint32_t')]: body('load_shared_%d'%n,'return *(const %s*)(emu_shared + at);'%t)
body('load_shared_2','return *(const uint16_t*)(emu_shared + at);')
body('load_shared_1','return *(const uint8_t*)(emu_shared + at);')
body('mask_or','return (a & MASK) | BITS;')
body('mma_16816','emu_mma16(d, a0, a1, a2, a3, b0, b1);')
body('mma_16832','emu_mma32(d, a0, a1, a2, a3, b0, b1);')
body('load_matrices','return emu_ldmatrix(row);')
body('clamp_half','return v > 65504.f ? 65504.f : v < -65504.f ? -65504.f : v;')
src=re.sub(r'asm volatile\("bar.sync %0, %1;" ::"r"\((.*?)\), "r"\((.*?)\) : "memory"\);',r'emu_bar(\1, \2);',src)
src=src.replace('__shared__ ','static thread_local ') if False else src
# static shared arrays: one block at a time, so plain statics
src=re.sub(r'extern __shared__ __align__\(128\) uint4 shared\[\];','uint4* const shared = (uint4*)emu_dynamic;',src)
src=re.sub(r'extern __shared__ uint4 shared\[\];','uint4* const shared = (uint4*)emu_dynamic;',src)
src=re.sub(r'__shared__ (__align__\(16\) )?(\w+(<\w+>)?) (\w+)((\[[^\]]*\])*);',lambda m:'using T_%s_ = %s; T_%s_* const p_%s_ = 0;'%(m[4],m[2],m[4],m[4]) if False else 'static_assert(true); auto& %s = *emu_static<%s>();'%(m[4],'E_%s_t'%m[4]) ,src) if False else src
src=re.sub(r'__shared__ (?:__align__\(16\) )?(\w+(?:<\w+>)?) (\w+)((?:\[[^\]]*\])*);',r'struct alignas(16) S_\2_ { \1 v\3; }; auto& \2 = ((S_\2_*)emu_alloc(sizeof(S_\2_)))->v;',src)
open('target/emulator/emu_kernels.inc','w').write(src)
