{{/* Sizes that follow from the settings: how many engines a pod holds, and how many pods there are. */}}

{{- define "hermes.gpusPerEngine" -}}
{{- $workers := .Values.settings.workers -}}
{{- if ne $workers.device "gpu" -}}0
{{- else -}}{{ $workers.gpus_per_replica | default $workers.tensor_parallel_size }}
{{- end -}}
{{- end }}

{{/* Engines per pod: limited by the pod's GPUs on GPUs, and by its CPUs on CPUs. */}}
{{- define "hermes.enginesPerPod" -}}
{{- $workers := .Values.settings.workers -}}
{{- if eq $workers.device "gpu" -}}
{{- divf (float64 .Values.engines.gpus) (float64 (include "hermes.gpusPerEngine" .)) | floor | int -}}
{{- else -}}
{{- divf (float64 .Values.engines.cpus) (float64 (max 1 (ceil $workers.cpus_per_replica))) | floor | int -}}
{{- end -}}
{{- end }}

{{- define "hermes.podsFor" -}}
{{- divf (float64 (index . 1)) (float64 (include "hermes.enginesPerPod" (index . 0))) | ceil | int -}}
{{- end }}

{{- define "hermes.minEnginePods" -}}
{{- $workers := .Values.settings.workers -}}
{{- $engines := $workers.replicas -}}
{{- with $workers.autoscaling }}{{ $engines = .min_replicas }}{{ end -}}
{{- include "hermes.podsFor" (list . $engines) -}}
{{- end }}

{{- define "hermes.maxEnginePods" -}}
{{- $workers := .Values.settings.workers -}}
{{- $engines := $workers.replicas -}}
{{- with $workers.autoscaling }}{{ $engines = .max_replicas }}{{ end -}}
{{- include "hermes.podsFor" (list . $engines) -}}
{{- end }}

{{/* A Kubernetes quantity or one of Redis's ("4gb", "8Gi") in MiB. */}}
{{- define "hermes.mebibytes" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "Ti" . -}}{{ mul $number 1048576 }}
{{- else if regexMatch "(?i)g" . -}}{{ mul $number 1024 }}
{{- else -}}{{ $number }}
{{- end -}}
{{- end }}

{{- define "hermes.ingressesPerPod" -}}
{{- divf (float64 .Values.settings.ingress.replicas) (float64 .Values.ingressPods.replicas) | ceil | int -}}
{{- end }}
