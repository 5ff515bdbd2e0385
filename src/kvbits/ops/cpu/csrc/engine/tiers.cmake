# Instruction-set tiers of this platform: `tiers`, and their compiler flags `flags_TIER`. Only the files of a tier may use instructions beyond the platform's
# baseline; dispatch.cpp chooses among them at load.
set(tiers generic)
set(flags_generic "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND tiers avx2 avx512)
  set(flags_avx2 -mavx2 -mfma -mf16c)
  set(flags_avx512 ${flags_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mprefer-vector-width=512)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  list(APPEND tiers neon)
  set(flags_neon -march=armv8.2-a+dotprod)
endif()
