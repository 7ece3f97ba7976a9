{{/* What pods share. */}}

{{/* The metadata and spec of every pod of the chart: (dict "root" $ "component" "redis" "id" 999 "spec" (include "hermes.redisSpec" $)
     "places" (list .Values.redis.internal) "of" (dict "exporter" .Values.redis.internal.exporter) "name" "a" "annotations" dict).
     `spec` is the component's own part. `places` are the sections of the values that are about this pod, and `of` has those about its
     further containers. `id` is the user and group. The last three may be missing. */}}
{{- define "hermes.pod" -}}
{{- $ := .root -}}
{{- $of := .of | default dict -}}
{{- $said := include "hermes.said" (concat (list (include "hermes.restricted" .id | fromYaml) $.Values) .places) | fromJson -}}
{{- $ofAll := omit $said "resources" -}}
{{- $spec := .spec | fromYaml -}}
{{- $main := (first $spec.containers).name -}}
{{- range $kind, $more := dict "initContainers" "initContainers" "containers" "extraContainers" }}
{{- $containers := list }}
{{- range get $spec $kind | default list }}
{{- $its := eq .name $main | ternary $said (include "hermes.said" (list $ofAll (get $of .name | default dict)) | fromJson) }}
{{- $containers = append $containers (include "hermes.container" (dict "container" . "said" $its) | fromYaml) }}
{{- end }}
{{- $added := get $said $more | default list }}
{{- $_ := eq $kind "containers" | ternary (concat $containers $added) (concat $added $containers) | set $spec $kind }}
{{- end }}
{{- $_ := set $spec "volumes" (concat ($spec.volumes | default list) ($said.extraVolumes | default list)) -}}
{{- $_ := set $spec "securityContext" $said.podSecurityContext -}}
{{- $scheduling := pick $said "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" -}}
{{- $common := merge (dict) ($.Values.commonLabels | default dict) (dict "app.kubernetes.io/name" ($.Values.nameOverride | default $.Chart.Name)) -}}
metadata:
  {{- with .name }}
  name: {{ . }}
  {{- end }}
  labels:
    {{- merge (include "hermes.component" (list $ .component) | fromYaml) ($said.podLabels | default dict) $common | toYaml | nindent 4 }}
  {{- with merge (dict) (.annotations | default dict) ($said.podAnnotations | default dict) ($.Values.commonAnnotations | default dict) }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- range $key, $value := merge $spec $scheduling (pick $said "imagePullSecrets") (dict "automountServiceAccountToken" false "enableServiceLinks" false) }}
  {{- if or $value (kindIs "bool" $value) }}
  {{- dict $key $value | toYaml | nindent 2 }}
  {{- end }}
  {{- end }}
{{- end }}

{{/* A container with what the values say of it: (dict "container" dict "said" dict). Of variables with the same name the last counts. */}}
{{- define "hermes.container" -}}
{{- $said := .said -}}
{{- $env := list -}}
{{- $names := list -}}
{{- range concat (.container.env | default list) ($said.extraEnv | default list) | reverse }}
{{- if not (has .name $names) }}
{{- $names = append $names .name }}
{{- $env = prepend $env . }}
{{- end }}
{{- end }}
{{- $mounts := concat (.container.volumeMounts | default list) ($said.extraVolumeMounts | default list) -}}
{{- $more := dict "env" $env "envFrom" $said.extraEnvFrom "volumeMounts" $mounts "securityContext" $said.containerSecurityContext -}}
{{- $resources := mergeOverwrite (dict) .container.resources ($said.resources | default dict) -}}
{{- range $key, $value := merge (dict "resources" $resources) $more .container }}
{{- if $value }}
{{ dict $key $value | toYaml }}
{{- end }}
{{- end }}
{{- end }}

{{/* What several places of the values say of a pod, as JSON. The later ones add to lists and maps and replace everything else; a
     security context is replaced as a whole, and null or {} leaves it out, so that OpenShift assigns the ids. */}}
{{- define "hermes.said" -}}
{{- $said := dict -}}
{{- $keys := list "podLabels" "podAnnotations" "imagePullSecrets" "podSecurityContext" "containerSecurityContext" "resources"
      "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName"
      "extraEnv" "extraEnvFrom" "extraVolumes" "extraVolumeMounts" "initContainers" "extraContainers" -}}
{{- range $place := . }}
{{- range $key, $value := $place }}
{{- if has $key $keys }}
{{- $before := get $said $key }}
{{- if hasSuffix "SecurityContext" $key }}{{ $_ := set $said $key $value }}
{{- else if kindIs "slice" $value }}{{ $_ := set $said $key (concat ($before | default list) $value) }}
{{- else if kindIs "map" $value }}{{ $_ := set $said $key (merge (deepCopy $value) ($before | default dict)) }}
{{- else if $value }}{{ $_ := set $said $key $value }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
{{ toJson $said }}
{{- end }}

{{/* The security contexts, unless the values have others. */}}
{{- define "hermes.restricted" -}}
podSecurityContext:
  runAsNonRoot: true
  runAsUser: {{ . }}
  runAsGroup: {{ . }}
  fsGroup: {{ . }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
containerSecurityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Requests, and limits of what cannot be shared: (dict "root" $ "cpus" 2 "memory" "4Gi" "gpus" 1) */}}
{{- define "hermes.resources" -}}
resources:
  requests:
    cpu: {{ .cpus | quote }}
    memory: {{ .memory }}
  limits:
    memory: {{ .memory }}
    {{- if .root.Values.cpuLimits }}
    cpu: {{ .cpus | quote }}
    {{- end }}
    {{- if .gpus }}
    {{ .root.Values.engines.gpuResource }}: {{ .gpus | quote }}
    {{- end }}
{{- end }}

{{/* Of a pod of which there is only one (the head, Redis): by default Kubernetes would leave it on a dead node for five minutes. */}}
{{- define "hermes.soonElsewhere" -}}
tolerations:
  {{- range list "unreachable" "not-ready" }}
  - {key: node.kubernetes.io/{{ . }}, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
  {{- end }}
{{- end }}

{{/* The pods of `helm test` and `helm uninstall` may run where the head may: such nodes have the image already. */}}
{{- define "hermes.whereTheHeadIs" -}}
{{ pick .Values.head "nodeSelector" "tolerations" "affinity" "runtimeClassName" | toYaml }}
{{- end }}
