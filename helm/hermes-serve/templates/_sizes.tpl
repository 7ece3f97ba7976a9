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

{{/* Serve's autoscaling_config as JSON, with the service's defaults and its preset's target; {} without autoscaling. */}}
{{- define "hermes.autoscaling" -}}
{{- $ours := .Files.Get "files/settings.json" | fromJson -}}
{{- $workers := .Values.settings.workers -}}
{{- $scaling := dict -}}
{{- if not (kindIs "invalid" $workers.autoscaling) -}}
{{- $scaling = deepCopy $workers.autoscaling -}}
{{- with get $ours.presets (.Values.settings.preset | default "") -}}
{{- $running := $workers.max_running_requests | default .sequences -}}
{{- $scaling = merge $scaling (dict "target_ongoing_requests" (maxf 1.0 (mulf .busy_share $running))) -}}
{{- end -}}
{{- $scaling = merge $scaling $ours.autoscaling -}}
{{- end -}}
{{- toJson $scaling -}}
{{- end }}

{{- define "hermes.minEnginePods" -}}
{{- $scaling := include "hermes.autoscaling" . | fromJson -}}
{{- include "hermes.podsFor" (list . ($scaling.min_replicas | default .Values.settings.workers.replicas)) -}}
{{- end }}

{{- define "hermes.maxEnginePods" -}}
{{- $scaling := include "hermes.autoscaling" . | fromJson -}}
{{- $pods := include "hermes.podsFor" (list . ($scaling.max_replicas | default .Values.settings.workers.replicas)) | int -}}
{{- ternary (max $pods .Values.autoscaler.maxPods) $pods (not (empty $scaling)) -}}
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
