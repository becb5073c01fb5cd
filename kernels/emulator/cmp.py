import struct,collections,sys
def funcs(p):
    b=open(p,'rb').read()
    shoff=struct.unpack_from('<Q',b,0x28)[0]; es,n,si=struct.unpack_from('<HHH',b,0x3a)
    sec=[struct.unpack_from('<IIQQQQIIQQ',b,shoff+i*es) for i in range(n)]
    st=sec[si]; out={}
    for s in sec:
        nm=b[st[4]+s[0]:b.index(b'\0',st[4]+s[0])].decode()
        if nm.startswith('.text.'): out[nm[6:]]=b[s[4]:s[4]+s[5]]
    return out
ops=lambda b: collections.Counter(struct.unpack_from('<H',b,i)[0]&0xfff for i in range(0,len(b),16))
a,c=funcs(sys.argv[1]),funcs(sys.argv[2])
print({k:('=' if a[k]==c[k] else sum(((ops(a[k])-ops(c[k]))+(ops(c[k])-ops(a[k]))).values())) for k in sorted(c) if k in a})
